"""Losses put together at random: where rows are divided each is the plain loop's."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from tests.plain import Case, apart, plain, sgd, under
from tests.ranks import run

D = torch.float64
WEIGHT = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=D)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Nothing is ignored or masked in the first, which is the example."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g, dtype=D)
    y = torch.randint(0, 4, (rows,), generator=g)
    mask = torch.ones(rows, dtype=D)
    if seed:
        y[torch.arange(rows) % 3 == 1] = -100
        mask[torch.arange(rows) % 4 == 2] = 0
    return {"x": x, "y": y, "mask": mask}


class Loss:
    """A random expression of means, fractions and penalties."""

    LEAVES = ("ce", "weighted", "nll", "masked", "mean of masked", "mse", "mean", "sum over rows")

    def __init__(self, seed: int) -> None:
        self.g = torch.Generator().manual_seed(seed)
        self.tree = self.grow(2)

    def chance(self, n: int) -> int:
        return int(torch.randint(0, n, (), generator=self.g))

    def grow(self, depth: int) -> Any:
        kind = self.chance(6) if depth else 0
        if kind == 0:
            return self.LEAVES[self.chance(len(self.LEAVES))]
        below = self.grow(depth - 1)
        if kind == 1:
            return ("plus", below, self.grow(depth - 1))
        return (("times", "over", "penalty", "minus")[kind - 2], below)

    def __call__(self, model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return self.value(self.tree, model, b, model(b["x"]))

    def value(self, tree: Any, model: Any, b: dict[str, Tensor], out: Tensor) -> Tensor:
        each = out.square().mean(1)
        if isinstance(tree, str):
            leaves = {
                "ce": lambda: F.cross_entropy(out, b["y"]),
                "weighted": lambda: F.cross_entropy(out, b["y"], weight=WEIGHT),
                "nll": lambda: F.nll_loss(out.log_softmax(1), b["y"]),
                "masked": lambda: (each * b["mask"]).sum() / b["mask"].sum(),
                "mean of masked": lambda: (each * b["mask"]).mean() / b["mask"].mean(),
                "mse": lambda: F.mse_loss(out, out.detach().flip(1)),
                "mean": lambda: each.mean(),
                "sum over rows": lambda: each.sum() / b["x"].shape[0],
            }
            return leaves[tree]()  # type: ignore[no-any-return]
        kind, *below = tree
        x = self.value(below[0], model, b, out)
        if kind == "plus":
            return x + self.value(below[1], model, b, out)
        weights = model.a.weight.square().sum()
        return {
            "times": lambda: x * 1.5,
            "over": lambda: x / (1 + weights),
            "penalty": lambda: 0.01 * weights + x,
            "minus": lambda: 2.0 - x,
        }[kind]()  # type: ignore[no-any-return]


BATCHES = [batch(n, i) for i, n in enumerate((8, 7, 5))]


@contextmanager
def traced(cases: Sequence[Case]) -> Iterator[None]:
    """Inside, ranks that are forked take one trace of each case."""
    with ExitStack() as traces:
        for case in cases:
            traces.enter_context(case.one_trace("data"))
        yield


def trained(cases: Sequence[Case]) -> list[Any]:
    return [under(case, "data") for case in cases]


@pytest.mark.parametrize("seeds", [range(0, 8), range(20, 28)])
def test_random_losses_are_exact(seeds: range) -> None:
    cases = [Case(Net, Loss(seed), BATCHES) for seed in seeds]
    with traced(cases):
        answers = run(2, trained, cases, timeout=110)
    expected = [plain(case) for case in cases]
    for every in answers:
        for seed, found, wanted in zip(seeds, every, expected, strict=True):
            gap = apart(found, wanted)
            assert not found.opaque and gap <= 1e-10, (seed, Loss(seed).tree, gap)
            assert not found.warned, (Loss(seed).tree, found.warned)


def pieces(cases: Sequence[Case]) -> list[Any]:
    """Steps in which pieces are tried."""
    found = []
    for case in cases:
        model = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = prepare(model, sgd(model), case.loss, case.first(), "tensor")
            losses = [float(trainer.step(trainer.shard(b))) for b in case.batches]
            trainer.close()
        found.append(losses)
    return found


def test_random_losses_in_pieces() -> None:
    seeds = range(40, 52)
    batches = [batch(8, i) for i in range(14)]
    cases = [Case(Net, Loss(seed), batches) for seed in seeds]
    expected = [plain(case).losses for case in cases]
    with traced(cases):
        answers = run(2, pieces, cases, timeout=110)
    for every in answers:
        for seed, losses, wanted in zip(seeds, every, expected, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-10), (seed, Loss(seed).tree)
