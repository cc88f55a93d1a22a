"""An LSTM layer (Hochreiter and Schmidhuber 1997) behind dropout, over rows of one length."""

import torch
from torch import Tensor, nn


class LstmLayer(nn.Module):
    """(rows, length, inputs) to (rows, length, width).

    residual: the values are added to what the LSTM makes of them; both are `width` wide then."""

    def __init__(self, inputs: int, width: int, dropout: float, residual: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.residual = residual

    def forward(self, values: Tensor, context: Tensor | None = None) -> Tensor:
        """What the LSTM gives at every place, of the values with the context beside them: as many
        rows of the same length, together `inputs` wide."""
        inputs = values if context is None else torch.cat([values, context], -1)
        found: Tensor = self.lstm(self.dropout(inputs))[0]
        return found + values if self.residual else found
