"""Language models on the Penn treebank: LSTMs whose softmax over 10,000 words is their largest
part, and whose state goes from batch to batch (Zaremba et al. 2014, arXiv:1409.2329; Jozefowicz et
al. 2016, arXiv:1602.02410, have the same model with 793,471 words, BigLSTM)."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.workloads import packed, ptb_files
from synchromesh.workloads.continuing_text import ContinuingText
from synchromesh.workloads.training import adamw
from synchromesh.workloads.workload import Workload

WORDS = 10_000
SYNTHETIC_TOKENS = 20_001
State = tuple[tuple[Tensor, Tensor], ...]  # of each layer: output and cell, (rows, width) each


class LstmModel(nn.Module):
    """Embedding, LSTM layers of one width, softmax; dropout between them (Zaremba et al. 2014,
    section 3.1)."""

    def __init__(self, words: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.softmax = nn.Linear(width, words, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        """Scores (rows, steps, words) of the words behind `ids` (rows, steps), and the state."""
        x, found = self.dropout(self.embedding(ids)), []
        for layer, (output, cell) in zip(self.layers, state, strict=True):
            x, (output, cell) = layer(x, (output.unsqueeze(0), cell.unsqueeze(0)))
            x = self.dropout(x)
            found.append((output.squeeze(0), cell.squeeze(0)))
        return self.softmax(x), tuple(found)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], state: State) -> tuple[Tensor, State]:
    """Cross-entropy, the mean over all words of the batch; perplexity is its exponential."""
    ids, targets = batch
    scores, state = model(ids, state)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten()), state


def metric(
    model: nn.Module, batch: tuple[Tensor, Tensor], state: State
) -> tuple[dict[str, Tensor], State]:
    """Of each row, summed: the share of its words that were foreseen, and their mean loss."""
    ids, targets = batch
    scores, state = model(ids, state)
    right = (scores.argmax(-1) == targets).to(scores.dtype).mean(1)
    lost = F.cross_entropy(scores.transpose(1, 2), targets, reduction="none").mean(1)
    return {"accuracy": right.sum(), "loss": lost.sum()}, state


def beginning(rows: int, width: int, layers: int) -> State:
    """The state before the first word of each row: zeros."""
    return tuple((torch.zeros(rows, width), torch.zeros(rows, width)) for _ in range(layers))


def _texts(name: str, folder: Path | None, synthetic: bool) -> tuple[Tensor, Tensor, int]:
    """Ids to train on and to validate on, and how many words there are."""
    if synthetic:
        generator = torch.Generator().manual_seed(0)
        train, valid = torch.randint(WORDS, (2, SYNTHETIC_TOKENS), generator=generator)
        return train, valid, WORDS
    folder = packed.needed(folder, name, ptb_files.HOLDS)
    train, valid, _, vocabulary = ptb_files.read(folder)
    return train, valid, len(vocabulary.words)


def _workload(
    name: str, folder: Path | None, synthetic: bool, width: int, dropout: float, length: int,
    rows: int, rate: float, epochs: int,
) -> Workload:  # fmt: skip
    train, valid, words = _texts(name, folder, synthetic)
    return Workload(
        model=partial(LstmModel, words, width, 2, dropout), loss=loss,
        optimizer=adamw(rate, 0.0), train_data=ContinuingText(train, length), batch_size=rows,
        valid_data=ContinuingText(valid, length), metric=metric, epochs=epochs, name=name,
        carry=partial(beginning, width=width, layers=2),
    )  # fmt: skip


def lstm(folder: Path | None, synthetic: bool) -> Workload:
    """19.8 M parameters: the medium model of Zaremba et al. (section 4.1: width 650, 35 steps, 20
    rows, dropout 0.5) without the biases of its softmax; AdamW in place of SGD."""
    return _workload("ptb/lstm", folder, synthetic, 650, 0.5, 35, 20, 1e-3, 39)


def lstm_small(folder: Path | None, synthetic: bool) -> Workload:
    """997,632 parameters, of which embedding and softmax have 480,000 each: width 48."""
    return _workload("ptb/lstm_small", folder, synthetic, 48, 0.0, 20, 32, 4e-3, 4)
