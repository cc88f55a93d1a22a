"""Language models on the Penn treebank: LSTMs whose softmax over 10,000 words is their largest
part, and whose state goes from batch to batch (Zaremba et al. 2014, arXiv:1409.2329; Jozefowicz et
al. 2016, arXiv:1602.02410, have the same model with 793,471 words, BigLSTM)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.workloads import data_files, text_files
from synchromesh.workloads.recurrent import LstmModel, State, beginning
from synchromesh.workloads.text import ContinuingText
from synchromesh.workloads.training import adamw
from synchromesh.workloads.workload import Workload


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


def _texts(name: str, folder: Path | None, synthetic: bool) -> tuple[Tensor, Tensor, int]:
    """Ids to train on and to validate on, and how many words there are."""
    if synthetic:
        generator = torch.Generator().manual_seed(0)
        train, valid = torch.randint(10_000, (2, 20_001), generator=generator)
        return train, valid, 10_000
    folder = data_files.needed(folder, name, text_files.PTB_HOLDS)
    train, valid, _, vocabulary = text_files.read_ptb(folder)
    return train, valid, len(vocabulary.words)


@dataclass(frozen=True)
class _Form:
    """A size of the model and how it is trained; steps: that back-propagation goes back."""

    width: int
    dropout: float
    steps: int
    rows: int
    rate: float
    epochs: int

    def workload(self, name: str, folder: Path | None, synthetic: bool) -> Workload:
        train, valid, words = _texts(name, folder, synthetic)
        return Workload(
            model=partial(LstmModel, words, self.width, 2, self.dropout), loss=loss, metric=metric,
            optimizer=adamw(self.rate, 0.0), batch_size=self.rows, epochs=self.epochs,
            train_data=ContinuingText(train, self.steps),
            valid_data=ContinuingText(valid, self.steps),
            carry=partial(beginning, width=self.width, layers=2), name=name,
        )  # fmt: skip


FORMS = {
    # 19.8 M parameters: the medium model of Zaremba et al. (section 4.1) without the biases of its
    # softmax; AdamW in place of SGD
    "ptb/lstm": _Form(width=650, dropout=0.5, steps=35, rows=20, rate=1e-3, epochs=39),
    # 997,632 parameters, of which embedding and softmax have 480,000 each
    "ptb/lstm_small": _Form(width=48, dropout=0.0, steps=20, rows=32, rate=4e-3, epochs=4),
}
WORKLOADS = {name: partial(form.workload, name) for name, form in FORMS.items()}
