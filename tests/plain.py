"""The same steps in a plain PyTorch loop and under a plan: what tests of exactness compare.

`exact(case, plan, ranks)` compares losses, parameters and buffers of every rank. A case is traced
once for all its ranks and plans (tests/traces.py).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.capture.comparison import mean
from synchromesh.trace.capture.outputs import flat_outputs
from synchromesh.training.prepare import prepare
from tests.ranks import run
from tests.traces import shared

LIMIT = 1e-10
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    live = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(live, lr=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """A model, its loss, and the global batches of a few steps; the first one is the example."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    batches: Sequence[Any]
    optimizer: Optimizer = sgd
    example: Any = None
    between: Callable[[nn.Module, int], None] | None = None  # what the user does before step i
    micro_batches: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # of prepare

    def first(self) -> Any:
        """The example batch."""
        return self.batches[0] if self.example is None else self.example

    def one_trace(self, plan: str, ranks: int = 1) -> AbstractContextManager[None]:
        """Inside, all ranks and plans take one trace: equal builds compute the same."""
        return shared(self.build, self.build(), self.loss, self.first(), plan, ranks=ranks)


@dataclass
class Outcome:
    """Losses of the steps, the state dict after them, warnings."""

    losses: list[float]
    state: dict[str, Tensor]
    warned: list[str]
    opaque: str = ""


def plain(case: Case) -> Outcome:
    """One process, one loop: forward, backward, step. A pair (sum, weight) is their quotient."""
    model = case.build()
    optimizer = case.optimizer(model)
    losses = []
    for i, batch in enumerate(case.batches):
        if case.between is not None:
            case.between(model, i)
        optimizer.zero_grad()
        value = mean(flat_outputs(case.loss(model, batch))[1])
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    return Outcome(losses, {n: t.detach().clone() for n, t in model.state_dict().items()}, [])


def under(case: Case, plan: str) -> Outcome:
    """The same on this rank of a run."""
    model = case.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = case.optimizer(model)
        trainer = prepare(model, optimizer, case.loss, case.first(), plan, **case.options)
        losses = []
        for i, batch in enumerate(case.batches):
            if case.between is not None:
                case.between(model, i)
            losses.append(float(trainer.step(trainer.shard(batch), case.micro_batches)))
        found = Outcome(losses, trainer.state_dict(), [str(w.message) for w in caught])
        found.opaque = trainer.traced.reason
        trainer.close()
    return found


def on_ranks(case: Case, plan: str, ranks: int, timeout: float = 60.0) -> list[Outcome]:
    with case.one_trace(plan, ranks):
        return run(ranks, under, case, plan, timeout=timeout) if ranks > 1 else [under(case, plan)]


@contextmanager
def traced(*cases: tuple[Case, str], ranks: int = 4) -> Iterator[None]:
    """Inside, ranks take traces of all these cases under their plans that were made once. Models
    of one test module that have equal tensors compute the same."""
    with ExitStack() as stack:
        for case, plan in cases:
            module, model, example = cases[0][0].build.__module__, case.build(), case.first()
            stack.enter_context(shared(module, model, case.loss, example, plan, ranks=ranks))
        yield


def all_on_ranks(cases: Sequence[tuple[Case, str]], ranks: int = 4) -> list[list[Outcome]]:
    """By rank, the outcomes of all cases under their plans, in one run."""
    with traced(*cases, ranks=ranks):
        return run(ranks, _all_under, cases, timeout=120.0)


def _all_under(cases: Sequence[tuple[Case, str]]) -> list[Outcome]:
    return [under(case, plan) for case, plan in cases]


def apart(a: Outcome, b: Outcome) -> float:
    """The largest difference of losses and of tensors of the state, relative to 1 or their size;
    infinite where something is missing or only one of two is not a number."""
    worst = 0.0
    if a.state.keys() != b.state.keys() or len(a.losses) != len(b.losses):
        return float("inf")
    pairs = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(a.losses, b.losses, strict=True)]
    pairs += [(a.state[n], b.state[n]) for n in a.state]
    for x, y in pairs:
        if x.shape != y.shape:
            return float("inf")
        if not x.numel():
            continue
        wide = torch.complex128 if x.is_complex() else torch.float64
        x, y = x.to(wide), y.to(wide)
        if not torch.equal(x.isfinite(), y.isfinite()):
            return float("inf")
        there = x.isfinite()
        if there.any():
            size = max(1.0, float(y[there].abs().max()))
            worst = max(worst, float((x[there] - y[there]).abs().max()) / size)
    return worst


def exact(case: Case, plan: str, ranks: int, limit: float = LIMIT) -> list[Outcome]:
    """AssertionError unless every rank's run under the plan is the plain loop's; its outcomes."""
    expected = plain(case)
    found = on_ranks(case, plan, ranks)
    for rank, outcome in enumerate(found):
        gap = apart(outcome, expected)
        assert gap <= limit, (
            f"{plan} on {ranks}: rank {rank} differs by {gap:.2e}; losses {outcome.losses} for "
            f"{expected.losses}; {outcome.opaque or 'traced'}; {outcome.warned}"
        )
    return found
