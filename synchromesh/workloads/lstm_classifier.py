"""A classifier of sentences: LSTM layers over word embeddings, and a linear layer on the mean of
what the last of them gives at the words."""

from torch import Tensor, nn

from synchromesh.workloads.lstm_layer import LstmLayer


class LstmClassifier(nn.Module):
    """Logits (rows, classes) of ids and an attention mask, both (rows, length).

    Padding stands behind the words, where no word's output sees it, and the mean leaves it out."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LstmLayer(width, width, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (rows, classes)."""
        values = self.embedding(input_ids)
        for layer in self.layers:
            values = layer(values)
        mask = attention_mask.unsqueeze(-1).to(values.dtype)
        mean = (values * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits
