"""GNMT, an encoder and a decoder of LSTM layers with attention between them (Wu et al. 2016,
arXiv:1609.08144), for training on whole target sentences (teacher forcing).

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

from synchromesh.workloads.lstm_layer import LstmLayer


class Gnmt(nn.Module):
    """Logits (rows, target length, target words) of source ids (rows, source length) and target
    ids (rows, target length), each place having seen the target up to itself.

    padding: the id that ends shorter sentences, which nothing else depends on."""

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
        """Logits (rows, target length, target words)."""
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
