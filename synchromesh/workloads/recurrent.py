"""Recurrent nets: a language model, a classifier of sentences, and GNMT, all of LSTM layers
(Hochreiter and Schmidhuber 1997).

GNMT (Wu et al. 2016, arXiv:1609.08144) is an encoder and a decoder with attention between them,
here for training on whole target sentences (teacher forcing):

    encoder    e_1 = [LSTM(x); LSTM from the last word to the first], e_2 = LSTM(e_1),
               e_i = LSTM(e_(i-1)) + e_(i-1) from the third layer on                 (figure 1)
    attention  score_ts = v tanh(W d_1t + U e_s), a_t = sum_s softmax_s(score_ts) e_s    (eq. 4)
    decoder    d_1 = LSTM(y), d_2 = LSTM([d_1; a]),
               d_i = LSTM([d_(i-1); a]) + d_(i-1) from the third layer on

Simplified: d_1t asks at its own step t, as in MLPerf's GNMT, not at the one before it, so that
each layer runs over the whole sentence at once; words, not word pieces, are the tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[tuple[Tensor, Tensor], ...]  # of each layer: output and cell, (rows, width) each


class LstmModel(nn.Module):
    """Embedding, LSTM layers of one width, softmax (Zaremba et al. 2014, section 3.1)."""

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.softmax = nn.Linear(width, words, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores (rows, steps, words) of the words behind `ids` (rows, steps), and the state."""
        x, states = self.dropout(self.embedding(ids)), []
        for layer, (output, cell) in zip(self.layers, state, strict=True):
            x, (output, cell) = layer(x, (output.unsqueeze(0), cell.unsqueeze(0)))
            x = self.dropout(x)
            states.append((output.squeeze(0), cell.squeeze(0)))
        return self.softmax(x), tuple(states)


def beginning(rows: int, width: int, layers: int) -> State:
    """The state before the first word of each row: zeros."""
    return tuple((torch.zeros(rows, width), torch.zeros(rows, width)) for _ in range(layers))


class LstmLayer(nn.Module):
    """An LSTM behind dropout: (rows, length, inputs) to (rows, length, width). residual: the
    values are added to what the LSTM makes of them; both are `width` wide then."""

    def __init__(self, inputs: int, width: int, dropout: float, residual: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.residual = residual

    def forward(self, values: Tensor, context: Tensor | None = None) -> Tensor:
        """What the LSTM gives at every place of the values, with the context beside them."""
        inputs = values if context is None else torch.cat([values, context], -1)
        outputs: Tensor = self.lstm(self.dropout(inputs))[0]
        return outputs + values if self.residual else outputs


class LstmClassifier(nn.Module):
    """Logits (rows, classes) of ids and an attention mask, both (rows, length): linear, on the
    mean of the last LSTM layer at the words. Padding stands behind these and is seen by none."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LstmLayer(width, width, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        values = self.embedding(input_ids)
        for layer in self.layers:
            values = layer(values)
        mask = attention_mask.unsqueeze(-1).to(values.dtype)
        mean = (values * mask).sum(1) / mask.sum(1)
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits


class Gnmt(nn.Module):
    """Logits (rows, target length, target words) of source and target ids (rows, length), each
    place having seen the target up to itself. padding: the id that ends shorter sentences."""

    def __init__(
        self, words: tuple[int, int], width: int, layers: int, dropout: float, padding: int
    ) -> None:
        super().__init__()
        assert layers >= 2
        self.padding = padding
        self.source_embedding = nn.Embedding(words[0], width)
        self.both_ways = BothWays(width, dropout)
        self.encoder = nn.ModuleList(
            LstmLayer((2 if i == 1 else 1) * width, width, dropout, residual=i >= 2)
            for i in range(1, layers)
        )
        self.target_embedding = nn.Embedding(words[1], width)
        self.bottom = LstmLayer(width, width, dropout)
        self.attention = Attention(width)
        self.decoder = nn.ModuleList(
            LstmLayer(2 * width, width, dropout, residual=i >= 2) for i in range(1, layers)
        )
        self.classifier = nn.Linear(width, words[1])

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = source != self.padding
        encoded: Tensor = self.both_ways(self.source_embedding(source), mask)
        for layer in self.encoder:
            encoded = layer(encoded)
        values: Tensor = self.bottom(self.target_embedding(target))
        context = self.attention(values, encoded, mask)
        for layer in self.decoder:
            values = layer(values, context)
        logits: Tensor = self.classifier(values)
        return logits


class BothWays(nn.Module):
    """Two LSTM layers side by side, of which one reads from the last word to the first."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.forwards = LstmLayer(width, width, dropout)
        self.backwards = LstmLayer(width, width, dropout)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """(rows, length, 2 width); `mask` is true at words."""
        turned = reverse(self.backwards(reverse(values, mask)), mask)
        return torch.cat([self.forwards(values), turned], -1)


def reverse(values: Tensor, mask: Tensor) -> Tensor:
    """`values` (rows, length, width) with the words of each row, where `mask` (rows, length) is
    true, in reverse order, and the padding behind them where it was.

        a b c . .   ->   c b a . ."""
    place = torch.arange(mask.shape[1], device=mask.device)
    source = torch.where(mask, mask.sum(1, keepdim=True) - 1 - place, place)
    return values.gather(1, source.unsqueeze(-1).expand_as(values))


class Attention(nn.Module):
    """Which places of the source matter to each place of the target."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, asking: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        """Means of `encoded` (rows, source length, width) over the words, where `mask` is true,
        weighted for each place of `asking` (rows, target length, width)."""
        pairs = self.query(asking).unsqueeze(2) + self.key(encoded).unsqueeze(1)
        scores = self.score(torch.tanh(pairs)).squeeze(-1)
        scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
        return F.softmax(scores, -1) @ encoded
