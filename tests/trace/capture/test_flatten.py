"""The flat graph: what operators read from sizes and types at run time is written down."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.run import run
from synchromesh.trace.step import Step

D, ONES = torch.float64, torch.ones(2, 4, 8, dtype=torch.int64)


class Net(nn.Module):
    def __init__(self, body: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.layer = nn.Linear(6, 8)
        self.table = nn.Embedding(5, 8, sparse=True)
        self.wide = nn.Parameter(torch.randn(2, 4, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def traced(body: Callable[[Net, Tensor], Tensor]) -> tuple[Net, Step]:
    model = Net(body)
    step = trace(model, loss, torch.randn(6, 6, dtype=D), training=True)
    assert not step.opaque, step.reason
    return model, step


BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "squeeze": lambda m, h: h.unsqueeze(1).squeeze().cumsum(1),
    "squeeze of a row dim": lambda m, h: h.squeeze(0).cumsum(1),
    "squeeze_": lambda m, h: (h * 2).unsqueeze_(1).squeeze_().cumsum(1),
    "squeeze of several": lambda m, h: h.view(-1, 1, 8, 1).squeeze((0, 1, -1)).cumsum(1),
    "of the shape of another": lambda m, h: h.unsqueeze(1).view_as(h).expand_as(h).reshape_as(h),
    "type as": lambda m, h: h.type_as(m.wide) + h.float().type_as(m.wide),
    "take along": lambda m, h: h + m.wide.take_along_dim(torch.tensor([3, 9])).sum(),
    "take along a dim": lambda m, h: h + m.wide.take_along_dim(ONES, 2)[0, 0],
    "sparse table": lambda m, h: h + m.table(h.argmax(-1) % 5),
}


@pytest.mark.parametrize("name", BODIES)
def test_rows_one_by_one_are_the_rows_of_a_batch(name: str) -> None:
    model, step = traced(BODIES[name])
    x = torch.randn(3, 6, dtype=D)
    expected = loss(model, x)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    value = sum(run(step, model, row)[0] for row in x.split(1)) / 3
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(value, expected)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs.to_dense())


@pytest.mark.parametrize("p", [(), (0.5,), (0.25,)])
def test_defaults_of_an_in_place_operator_are_kept(p: Any) -> None:
    model, step = traced(lambda m, h: h * torch.empty(8, dtype=D).bernoulli_(*p))
    x = torch.randn(3, 6, dtype=D)
    torch.manual_seed(3)
    expected = loss(model, x)
    torch.manual_seed(3)
    torch.testing.assert_close(run(step, model, x)[0], expected)
