"""Values reduced over the batch: losses and metrics that read early activations, under plans whose
degrees differ."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.planner.decision import decide
from synchromesh.trace.capture.capture import trace
from synchromesh.training.prepare import prepare
from synchromesh.values.plan import Plan
from tests.profiling.hurried import hurried
from tests.ranks import run
from tests.traces import remembered, shared

PLANS = ("data; b=tensor", "tensor; b=data", "data; b=hybrid:tensor=2", "hybrid:tensor=2; b=data")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.a(x))
        return hidden, self.b(hidden)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden, out = model(batch["x"])
    return F.cross_entropy(out, batch["y"]) + hidden.pow(2).sum(1).mean()


def metric(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    hidden, _ = model(batch["x"])
    _, out = model(batch["x"])  # a second call of every module
    return {"h": hidden.pow(2).sum(), "c": F.cross_entropy(out, batch["y"], reduction="sum")}


def batch(rows: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=g, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 4, (rows,), generator=g)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def planned(plan: str) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    net = model()
    trainer = prepare(net, torch.optim.SGD(net.parameters(), 0.1), loss, batch(12), plan)
    losses = [trainer.step(trainer.shard(batch(rows))).item() for rows in (12, 7)]
    measured = trainer.evaluate([trainer.shard(batch(9))], metric)
    state = trainer.state_dict()
    trainer.close()
    return losses, state, measured


@pytest.mark.filterwarnings("ignore:rows depend on each other")
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_and_a_metric_that_read_an_early_activation(plan: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for rows in (12, 7):
        value = loss(net, batch(rows))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        measured = {name: float(x) / 9 for name, x in metric(net, batch(9)).items()}
    remembered("reduced values", net, metric, batch(9), training=False, cuts=("b",))
    with shared("reduced values", net, loss, batch(12), plan, ranks=4):
        answers = run(4, planned, plan)
    for got in answers:
        assert got[0] == pytest.approx(losses, rel=1e-12)
        assert got[2] == pytest.approx(measured, rel=1e-12)
        for name, tensor in net.state_dict().items():
            assert torch.allclose(got[1][name], tensor, rtol=1e-12, atol=1e-14)


class Measured(nn.Module):
    """A layer and the mean of what it makes, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x))
        return h, h.square().mean() * self.scale


class Reduced(nn.Module):
    """What the loss reads in `b` is a mean over the batch, which `a` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Measured(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, reduced = self.a(x)
        return reduced, self.b(h)


def reduced_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    reduced, out = model(batch["x"])
    return F.mse_loss(out, batch["x"][:, :4]) + reduced  # type: ignore[no-any-return]


def refused() -> str:
    net: Any = Reduced().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="reduces over its rows") as caught:
        prepare(net, optimizer, reduced_loss, batch(12), "data; b=tensor")
    return str(caught.value)


def test_what_cannot_be_computed_again_is_refused() -> None:
    assert trace(Reduced().double(), reduced_loss, batch(6), training=True).graph is not None
    for text in run(2, refused):
        assert "equal data degrees" in text


def chosen() -> tuple[str, str]:
    net: Any = Reduced().double()
    patch = pytest.MonkeyPatch()
    texts = ("data", "data; b=tensor")
    patch.setattr(decide, "plain", lambda *_, **__: [Plan.parse(t) for t in texts])
    with hurried():
        trainer = prepare(net, torch.optim.SGD(net.parameters(), 0.1), reduced_loss, batch(12))
    patch.undo()
    assert trainer.choice is not None
    told = {str(c.plan): c.reason for c in trainer.choice.candidates}
    trainer.close()
    return str(trainer.plan), told["data; b=tensor"]


@pytest.mark.filterwarnings("ignore:rows depend on each other")
def test_auto_passes_over_what_cannot_be_computed_again() -> None:
    for plan, reason in run(2, chosen, timeout=110):
        assert plan != "data; b=tensor" and "equal data degrees" in reason


def early(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"h": torch.tanh(model.a(batch["x"])).pow(2).sum()}


def measured(plan: str) -> dict[str, float]:
    net = model()
    trainer = prepare(net, torch.optim.SGD(net.parameters(), 0.1), loss, batch(12), plan)
    found = trainer.evaluate([trainer.shard(batch(rows)) for rows in (12, 7)], early)
    trainer.close()
    return found


@pytest.mark.filterwarnings("ignore:rows depend on each other")
def test_a_metric_of_components_whose_data_degree_is_not_the_largest() -> None:
    """The batch lies by the largest one of the training step, of which the metric has no part."""
    net, plan = model(), "tensor; b=data"
    with torch.no_grad():
        expected = sum(float(early(net, batch(rows))["h"]) for rows in (12, 7)) / 19
    with shared("reduced values", net, loss, batch(12), plan, ranks=4):
        for found in run(4, measured, plan):
            assert found == pytest.approx({"h": expected}, rel=1e-12)
