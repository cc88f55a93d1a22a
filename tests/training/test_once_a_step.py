"""What a model changes whatever its rows (the power iteration of a spectral norm, a buffer that
follows parameters, a count of steps) changes once a step, into however many micro-batches a batch
is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as by_hook

from tests.plain import Case, all_on_ranks, apart, exact, plain

D = torch.float64


class Follower(nn.Module):
    """A layer whose scale follows its parameter, and which counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(9, 9)
        self.register_buffer("scale", torch.ones(9))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.scale: Tensor
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        before = x * self.scale.clone()
        with torch.no_grad():
            self.count.add_(1)
            self.scale.mul_(0.9).add_(self.inner.bias, alpha=0.5)
        return self.inner(before) * self.scale.clone() / self.count.clone()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(5, 9)), nn.Tanh(), Follower(),
        by_hook(nn.Linear(9, 9)), nn.Tanh(), nn.Linear(9, 3),
    ).to(D)  # fmt: skip


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    return torch.randn(count, 5, generator=g, dtype=D), torch.randint(0, 3, (count,), generator=g)


BATCHES = [rows(n) for n in (8, 7, 9)]
PLANS = [
    ("data", 1), ("tensor", 1), ("data; @micro_batches=3", 1), ("tensor", 2),
    ("data:recompute=yes; @micro_batches=2", 1), ("data; @stages=0:0/1:3; @micro_batches=4", 1),
]  # fmt: skip


def case(micro_batches: int) -> Case:
    return Case(build, loss, BATCHES, micro_batches=micro_batches)


def test_under_plans_with_micro_batches() -> None:
    expected = plain(case(1))
    for of_rank in all_on_ranks([(case(n), plan) for plan, n in PLANS], ranks=2):
        for (plan, n), outcome in zip(PLANS, of_rank, strict=True):
            gap = apart(outcome, expected)
            assert gap <= 1e-10 and not outcome.opaque, f"{plan}, {n}: {gap:.1e} {outcome.opaque}"


def test_backward_calls_of_an_accumulation_are_forwards_of_their_own() -> None:
    (found,) = exact(case(1), "single", 1)
    assert not found.warned


@pytest.mark.parametrize("plan", ["data; @micro_batches=2"])
def test_a_model_that_runs_as_it_is_says_so(plan: str) -> None:
    def branching(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        return value * 2 if value.item() > 1e9 else value

    outcome = all_on_ranks([(Case(build, branching, BATCHES), plan)], ranks=2)[0][0]
    (text,) = [t for t in outcome.warned if "micro-batch" in t]
    assert outcome.opaque and "2.count" in text and "in each of 2 micro-batches" in text
