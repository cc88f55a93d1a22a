"""Traces made in the middle of training are compared with the model as the first one is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.plain import Case, exact, on_ranks
from tests.ranks import RankFailed

D = torch.float64


class Triple(torch.autograd.Function):
    """A backward that tracing loses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class Net(nn.Module):
    """`when(module, x)`: whether the custom function is run."""

    def __init__(self, when: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.when, self.drop = nn.Linear(4, 4).double(), when, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        return Triple.apply(y) if self.when(self, x) else y  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("data", 2)])
def test_another_length_is_compared(plan: str, ranks: int) -> None:
    batches = [batch(i, 6, n) for i, n in enumerate((3, 3, 7, 7))]
    found = exact(Case(lambda: Net(lambda m, x: x.shape[1] > 5), loss, batches), plan, ranks)
    assert any("runs as it is" in text for text in found[0].warned)


def test_another_case_of_rows_is_compared() -> None:
    batches = [batch(i, n) for i, n in enumerate((6, 6, 18, 18))]
    exact(Case(lambda: Net(lambda m, x: x.shape[0] > 16), loss, batches), "single", 1)


def test_a_model_that_was_found_to_differ_is_not_believed_when_it_is_cut() -> None:
    def mode(model: nn.Module, i: int) -> None:
        model.drop.train(i > 1)

    case = Case(lambda: Net(lambda m, x: m.drop.training), loss, [batch(i, 6) for i in range(4)])
    toggled = Case(case.build, loss, case.batches, between=mode)
    exact(toggled, "data", 2)
    with pytest.raises(RankFailed, match="switch to the plan 'data' before such a change"):
        on_ranks(toggled, "tensor", 2)


def short(model: nn.Module, x: Tensor) -> bool:
    assert x.shape[1] <= 5, f"length {x.shape[1]}, and at most 5 are known"
    return False


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_what_the_model_itself_refuses_is_told_as_its_own(plan: str) -> None:
    case = Case(lambda: Net(short), loss, [batch(i, 6, n) for i, n in enumerate((5, 7))])
    with pytest.raises(RankFailed, match="length 7, and at most 5") as raised:
        on_ranks(case, plan, 2)
    told = str(raised.value)
    assert "tensor operations alone" not in told
    assert plan == "data" or ("fails on a batch of" in told and "traced or not" in told)
