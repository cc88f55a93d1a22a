"""Rows that depend on each other in ways that the example batch does not show: its rows are all
alike, so that whatever is reduced over some of them is the same over all."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from tests.plain import Case, Outcome, all_on_ranks, apart, plain, sgd, traced
from tests.ranks import run

D = torch.float64
Batch = dict[str, Tensor]
SIZES = (8, 7, 5)  # rows of batches: on two ranks 7 and 5 do not divide


class Net(nn.Module):
    """Two layers; `middle` is what happens to rows between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, middle: Any = None) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h if middle is None else middle(h))  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> Batch:
    """The first one, which is the example, has equal rows and weights of 1."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g, dtype=D)
    y = torch.randint(0, 4, (rows,), generator=g)
    w = 0.5 + 2 * torch.rand(rows, generator=g, dtype=D)
    if not seed:
        x, y, w = x[:1].repeat(rows, 1), y[:1].repeat(rows), torch.ones(rows, dtype=D)
    return {"x": x, "y": y, "w": w}


Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # losses of rows, weights, labels -> the loss


def of_rows(form: Form) -> Any:
    def loss(model: nn.Module, b: Batch) -> Tensor:
        return form(F.cross_entropy(model(b["x"]), b["y"], reduction="none"), b["w"], b["y"])

    return loss


def of_inputs(form: Callable[[Tensor], Tensor]) -> Any:
    return lambda model, b: F.cross_entropy(model(form(b["x"])), b["y"])


def of_activations(middle: Callable[[Tensor], Tensor]) -> Any:
    return lambda model, b: F.cross_entropy(model(b["x"], middle), b["y"])


def no_grad(each: Tensor, w: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        largest = each.max()
    return (each / largest).mean()


def within_capacity(each: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Of each label the first alone counts, as experts drop tokens beyond a capacity; of the
    example's none do."""
    place = (F.one_hot(y, 4) * (w != 1).long()[:, None]).cumsum(0).gather(1, y[:, None])[:, 0]
    return (each * (place <= 1)).mean()


FORMS: dict[str, Any] = {
    "max": of_rows(lambda each, w, y: (each * w / w.max()).mean()),
    "amax": of_rows(lambda each, w, y: (each * w / w.amax(0)).mean()),
    "amin": of_rows(lambda each, w, y: (each * w / w.amin()).mean()),
    "mean of weights": of_rows(lambda each, w, y: (each * w / w.mean()).mean()),
    "sum of weights": of_rows(lambda each, w, y: (each * w / w.sum()).sum()),
    "std": of_rows(lambda each, w, y: (each * (1 + w.std())).mean()),
    "norm": of_rows(lambda each, w, y: (each * (1 + (w - 1).norm())).mean()),
    "median": of_rows(lambda each, w, y: (each * w / w.median()).mean()),
    "quantile": of_rows(lambda each, w, y: (each * w / w.quantile(0.4)).mean()),
    "any": of_rows(lambda each, w, y: torch.where((w > 2.3).any(), 2 * each, each).mean()),
    "all": of_rows(lambda each, w, y: torch.where((w < 2.3).all(), 2 * each, each).mean()),
    "count": of_rows(lambda each, w, y: (each * (1 + (w > 1.5).sum())).mean()),
    "classes": of_rows(
        lambda each, w, y: (each / (1 + (F.one_hot(y, 4) * (w != 1)[:, None]).sum(0)[y])).mean()
    ),
    "class weights": lambda m, b: F.cross_entropy(
        m(b["x"]), b["y"], weight=1 + F.one_hot(b["y"], 4).sum(0) * (b["w"].max() - 1)
    ),
    "sorted": of_rows(lambda each, w, y: (each * w / w.sort().values[0]).mean()),
    "rank": of_rows(lambda each, w, y: (each * (w != 1) * w.argsort().argsort()).sum() / 3),
    "argmax": of_rows(lambda each, w, y: (each * w.index_select(0, each.argmax()[None])).mean()),
    "cumsum": of_rows(lambda each, w, y: (each * (1 + (w - 1).cumsum(0))).mean()),
    "threshold": of_rows(lambda each, w, y: (each * (each >= each.mean().detach())).mean()),
    "top k": of_rows(lambda each, w, y: (each * (each >= each.topk(2).values.min())).mean()),
    "detached mean": of_rows(lambda each, w, y: (each / each.mean().detach()).square().mean()),
    "no grad": of_rows(no_grad),
    "capacity": of_rows(within_capacity),
    "inputs by their max": of_inputs(lambda x: x / x.abs().max()),
    "inputs centred": of_inputs(lambda x: x - x.mean(0)),
    "inputs standardised": of_inputs(lambda x: (x - x.mean(0)) / (x.std(0) + 1)),
}
MIDDLES: dict[str, Callable[[Tensor], Tensor]] = {
    "activations by their max": lambda h: h / h.detach().abs().max(),
    "activations by argsort": lambda h: h * (h > h.index_select(0, h[:, 0].argsort()[:1])),
    "activations centred": lambda h: h - h.detach().mean(0),
}
BATCHES = [batch(n, i) for i, n in enumerate(SIZES)]
CASES = {name: Case(Net, loss, BATCHES) for name, loss in FORMS.items()} | {
    name: Case(Net, of_activations(middle), BATCHES) for name, middle in MIDDLES.items()
}


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    return all_on_ranks([(case, "data") for case in CASES.values()], ranks=2)


@pytest.mark.wide(10)
@pytest.mark.parametrize("name", CASES)
def test_what_the_example_hides_is_exact(name: str, outcomes: list[list[Outcome]]) -> None:
    at, expected = list(CASES).index(name), plain(CASES[name])
    for of_rank in outcomes:
        found = of_rank[at]
        assert not found.opaque
        assert apart(found, expected) <= 1e-10, (found.losses, expected.losses, found.warned)


def accumulated(cases: list[Case]) -> list[tuple[str, float]]:
    """Of each case the refusal of micro-batches, or the loss of a step in two."""
    found = []
    for case in cases:
        model = case.build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = prepare(model, sgd(model), case.loss, case.batches[0], "data")
        try:
            value = float(trainer.step(trainer.shard(case.batches[1]), micro_batches=2))
            found.append(("", value))
        except ValueError as error:
            found.append((str(error), 0.0))
        trainer.close()
    return found


def test_micro_batches_of_such_rows_are_exact_or_refused() -> None:
    cases = list(CASES.values())
    with traced(*((case, "data") for case in cases), ranks=2):
        answers = run(2, accumulated, cases, timeout=110)
    for answer in answers:
        for case, (refusal, value) in zip(cases, answer, strict=True):
            expected = float(case.loss(case.build(), case.batches[1]))
            assert "would part rows that depend on each other" in refusal or value == (
                pytest.approx(expected, rel=1e-10)
            ), (refusal, value, expected)
