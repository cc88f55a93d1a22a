"""A recurrent language model of a few numbers, its text, and a plain loop that trains it with its
carry: what plans are compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.batch import take
from synchromesh.workloads.text import ContinuingText
from synchromesh.workloads.workload import Workload

WORDS, WIDTH, ROWS, STEPS, LENGTH = 11, 4, 6, 6, 3
TEXT = torch.randint(
    WORDS, (ROWS * STEPS * LENGTH + 1,), generator=torch.Generator().manual_seed(5)
)


class Recurrent(nn.Module):
    """Embedding, two LSTM layers, words. stacked: its state is one tensor (rows, 4, width), which
    the last layer makes and both read; else a dict with a tuple for each layer."""

    def __init__(self, stacked: bool = False) -> None:
        super().__init__()
        self.stacked = stacked
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Scores of the next words, and the state behind them."""
        x, found = self.embedding(ids), {}
        for i, name in enumerate(("first", "second")):
            h, c = (state[:, 2 * i], state[:, 2 * i + 1]) if self.stacked else state[name]
            x, (h, c) = getattr(self, name)(x, (h[None].contiguous(), c[None].contiguous()))
            found[name] = h[0], c[0]
        stack = torch.stack([x for pair in found.values() for x in pair], 1)
        return self.words(x), stack if self.stacked else found


def loss(model: nn.Module, batch: Any, carry: Any) -> tuple[Tensor, Any]:
    """Cross-entropy of the words."""
    scores, carry = model(batch[0], carry)
    return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten()), carry


def metric(model: nn.Module, batch: Any, carry: Any) -> tuple[dict[str, Tensor], Any]:
    """The loss of each row, summed."""
    scores, carry = model(batch[0], carry)
    of_words = F.cross_entropy(scores.transpose(1, 2), batch[1], reduction="none")
    return {"loss": of_words.mean(1).sum()}, carry


def beginning(rows: int) -> Any:
    """The state as a dict."""
    zeros = torch.zeros(rows, WIDTH, dtype=torch.float64)
    return {"first": (zeros, zeros), "second": (zeros, zeros)}


def stacked_beginning(rows: int) -> Tensor:
    """The state as one tensor."""
    return torch.zeros(rows, 4, WIDTH, dtype=torch.float64)


def start_of(stacked: bool) -> Callable[[int], Any]:
    """The beginning of one or the other form."""
    return stacked_beginning if stacked else beginning


def workload(stacked: bool = False, **changes: Any) -> Workload:
    """Training of the model in float64 on its text."""
    given = {
        "model": lambda: Recurrent(stacked).double(), "loss": loss, "metric": metric,
        "optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "batch_size": ROWS,
        "train_data": ContinuingText(TEXT, LENGTH), "valid_data": ContinuingText(TEXT, LENGTH),
        "carry": start_of(stacked),
    }  # fmt: skip
    return Workload(**{**given, **changes})


def batches() -> list[tuple[Tensor, Tensor]]:
    """The text as continuing streams, written out: row i is its i-th part."""
    ids, following = (x.view(ROWS, STEPS, LENGTH) for x in (TEXT[:-1], TEXT[1:]))
    return [(ids[:, t], following[:, t]) for t in range(STEPS)]


def plain(epochs: int = 1, rows: int = ROWS) -> tuple[list[float], float]:
    """Losses of a plain loop over the first rows, and the mean loss of the text behind it."""
    torch.manual_seed(0)
    job = workload()
    model = job.build()
    optimizer, losses = job.build_optimizer(model.parameters()), []
    for _ in range(epochs):
        carry = beginning(rows)
        for batch in batches():
            value, carry = loss(model, take(batch, 0, rows), carry)
            carry = torch.utils._pytree.tree_map(Tensor.detach, carry)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
    carry, total = beginning(ROWS), 0.0
    with torch.no_grad():
        for batch in batches():
            found, carry = metric(model, batch, carry)
            total += found["loss"].item()
    return losses, total / ROWS / STEPS
