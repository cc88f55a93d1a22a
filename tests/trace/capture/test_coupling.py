"""Rows that depend on each other are named, with the operator and the line; others are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.coupling import coupling
from tests.models import FAMILIES, traced

Loss = Callable[[Tensor, Tensor], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)  # type: ignore[no-any-return]


def said(loss: Loss) -> str:
    batch = {"x": torch.randn(6, 6), "y": torch.rand(6)}
    step = trace(Net(), lambda m, b: loss(m(b["x"]), b["y"]), batch, training=True)
    assert step.graph is not None, step.reason
    return coupling(step.graph).why


@pytest.mark.wide(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_are_weighed_alike_are_not_coupled(name: str) -> None:
    assert not traced(name).coupling


ALIKE: dict[str, Loss] = {
    "mean": lambda h, y: h.square().mean(),
    "mask": lambda h, y: (h.sum(1) * (y > 0.5)).sum() / (y > 0.5).sum(),
    "pair": lambda h, y: ((h.sum(1) * y).sum(), y.sum()),
    "along others": lambda h, y: (h.softmax(1).cumsum(1).flip(1) * y[:, None]).mean(),
    "parts": lambda h, y: torch.cat([h, h * 2], 0).chunk(2, 0)[1].sum(1).mean(),
    "shape": lambda h, y: (h + torch.zeros_like(h.mean(0))).mean(),
    "two means": lambda h, y: h.square().mean() + y.mean() * h.mean(),
    "totals": lambda h, y: (h.sum(1) * y / y.sum()).sum() + (h * (y - y.mean())[:, None]).mean(),
    "fills": lambda h, y: torch.where(y[:, None] > 2, torch.zeros_like(h), h).mean(),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_losses_own_means_couple_nothing(name: str) -> None:
    assert not said(ALIKE[name])


COUPLED: dict[str, tuple[Loss, str]] = {
    "contrast": (lambda h, y: (h @ h.t()).softmax(1).sum(0).mean(), "matmul .* rows x rows"),
    "centre": (lambda h, y: (h - h.mean(0)).square().mean(), "sub .* rows were reduced to"),
    "weights": (lambda h, y: (h.sum(1) * y / y.max()).sum(), "div .* rows were reduced to"),
    "first": (lambda h, y: (h - h[0]).square().mean(), "sub .* rows were reduced to"),
    "cumsum": (lambda h, y: h.cumsum(0).tanh().mean(), "cumsum along dimension 0"),
    "softmax": (lambda h, y: (h.softmax(0) * h).mean(), "softmax along dimension 0"),
    "flip": (lambda h, y: F.mse_loss(h, h.flip(0)), "flip along dimension 0"),
    "sort": (lambda h, y: h.sort(0)[0].diff(dim=1).mean(), "sort along dimension 0"),
    "next": (lambda h, y: (h[1:] - h[:-1]).square().mean(), "slice along dimension 0"),
    "mask": (lambda h, y: (h * (y > y.median())[:, None]).mean(), "gt .* rows were reduced to"),
    "distance": (lambda h, y: F.mse_loss(h, h.mean(0, True)), "expand .* rows were reduced to"),
    "class weights": (
        lambda h, y: F.cross_entropy(h, (y > 0.5).long(), weight=h.detach().amax(0)),
        "cross_entropy_loss .* rows were reduced to",
    ),
    "least": (lambda h, y: (h * y.sort()[0][0]).mean(), "mul .* rows were reduced to"),
    "sum in order": (lambda h, y: (h * y.sort()[0].cumsum(0)[:, None]).mean(), "cumsum .* order"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_rows_is_named_with_its_line(name: str) -> None:
    loss, words = COUPLED[name]
    clause = said(loss)
    assert " at the loss" in clause
    first, *rest = words.split(" .* ")
    assert clause.startswith(first) and all(r in clause for r in rest)


def test_the_line_of_the_model_is_named() -> None:
    class Against(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return h @ h.t() @ h  # type: ignore[no-any-return]

    step = trace(Against(), lambda m, b: m(b).square().mean(), torch.randn(6, 6), training=True)
    assert step.graph is not None
    line = Against.forward.__code__.co_firstlineno + 2
    assert step.coupled == f"matmul at {__file__}:{line} makes a value of rows x rows"


class Chained(nn.Module):
    """Three components; `middle` is what happens between the first two."""

    def __init__(self, middle: Callable[["Chained", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.middle(self, x, self.a(x).tanh())))  # type: ignore[no-any-return]


Middle = Callable[[Chained, Tensor, Tensor], Tensor]
MIDDLES: dict[str, Middle] = {
    "apart": lambda m, x, h: h,
    "centred": lambda m, x, h: h - h.mean(0),
    "attended": lambda m, x, h: (h @ h.t()).softmax(1) @ h,
    "by a parameter": lambda m, x, h: (lambda most: m.b(h) + most)(m.a(x.amax(0))),
}
MEAN: Callable[[Tensor], Tensor] = lambda out: out.square().mean()  # noqa: E731
ROOT: Callable[[Tensor], Tensor] = lambda out: out.square().mean().sqrt()  # noqa: E731
CONTRAST: Callable[[Tensor], Tensor] = lambda out: (out @ out.t()).logsumexp(1).mean()  # noqa: E731


@pytest.mark.parametrize(
    ("middle", "loss", "components"),
    [
        ("apart", MEAN, ""),
        ("apart", ROOT, "c"),  # no operator couples rows, but the loss may
        ("apart", CONTRAST, "c"),
        ("centred", MEAN, "a"),
        ("centred", ROOT, "a c"),
        ("centred", CONTRAST, "a c"),
        ("attended", MEAN, "a"),  # what follows cannot be told apart by rows: one component
        ("by a parameter", MEAN, "a@1 b"),
    ],
)
def test_components_that_need_all_rows(
    middle: str, loss: Callable[[Tensor], Tensor], components: str
) -> None:
    model = Chained(MIDDLES[middle])
    step = trace(model, lambda m, b: loss(m(b)), torch.randn(6, 6), training=True)
    assert not step.opaque, step.reason
    assert " ".join(step.coupling) == components and bool(step.coupled) == bool(components)
