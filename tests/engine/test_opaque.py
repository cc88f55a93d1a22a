"""Models that cannot be traced, or whose trace computes something else, train as one component."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.engine.opaque import broadcast_state
from synchromesh.engine.world import World
from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.explain import explain, text
from synchromesh.trace.partition.partition import partition
from synchromesh.training.prepare import prepare
from synchromesh.values.plan import Plan
from synchromesh.verify.verify import parameter_bytes
from tests.ranks import run
from tests.traces import shared

D = torch.float64


class Double(torch.autograd.Function):
    """A straight-through sign, whose backward tracing loses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Branching(nn.Module):
    """Asks for values while it runs; which of its two heads is used depends on them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.low, self.high = nn.Linear(8, 4), nn.Linear(8, 4)
        self.never = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh()
        rows = [
            (self.high if float(row.detach()[0]) > 0.8 else self.low)(h)
            for row, h in zip(x, hidden, strict=True)
        ]
        return torch.stack(rows)


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Double.apply(self.first(x)))  # type: ignore[no-any-return]


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)
    return x[x[:, 0].argsort()], y  # high rows come last: only some ranks use that head


def loss(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def right(model: nn.Module, b: Any) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(b[0]), b[1], reduction="sum")}


SIZES = (8, 8, 3, 1)


def eager(kind: type[nn.Module]) -> tuple[list[float], dict[str, Tensor], float]:
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    losses = []
    for i, rows in enumerate(SIZES[: 3 if kind is Branching else 4]):
        optimizer.zero_grad()
        value = loss(model, batch(rows, i))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        value = right(model.eval(), batch(7, 9))["loss"] / 7
    return losses, {n: t.clone() for n, t in model.state_dict().items()}, float(value)


def planned(kind: type[nn.Module], plan: str) -> tuple[Any, Any, float, list[str], int, int]:
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = prepare(model, optimizer, loss, batch(8), plan, sync_batch_norm=True)
        losses = []
        for i, rows in enumerate(SIZES[: 3 if kind is Branching else 4]):
            trainer.world.ledger.reset()
            losses.append(float(trainer.step(trainer.shard(batch(rows, i)))))
            if not i:
                sent = trainer.world.ledger.calls["all_reduce"]
        value = trainer.evaluate([trainer.shard(batch(7, 9))], right)["loss"]
    state = trainer.state_dict()
    expected = explain(trainer.traced, trainer.partition, trainer.plan, trainer.world.size, 8)
    held = parameter_bytes(trainer)
    trainer.close()
    assert expected.parameter_bytes_per_rank[trainer.rank] == held
    return losses, state, value, [str(w.message) for w in told], sent, held


def scalar_metric() -> None:
    model = Branching()
    with pytest.warns(UserWarning, match="runs whole on every device"):
        trainer = prepare(model, torch.optim.SGD(model.parameters()), loss, batch(8), "data")
    for metric in (loss, lambda m, b: loss(m, b)):  # the trainer's own, and another
        with pytest.raises(ValueError, match="metric returned a scalar or a pair, as losses do"):
            trainer.evaluate([batch(7)], metric)


def test_a_metric_that_is_a_loss_is_refused() -> None:
    run(1, scalar_metric)


@pytest.mark.parametrize("kind", [Branching, Straight])
def test_opaque_models_compute_what_eager_does_under_any_plan(kind: type[nn.Module]) -> None:
    losses, state, value = eager(kind)
    for plan, ranks in (("data", 2), ("tensor", 2), ("hybrid:tensor=2", 4)):
        with shared(kind, kind(), loss, batch(8), plan):
            answers = run(ranks, planned, kind, plan)
        for rank, got in enumerate(answers):
            assert got[0] == pytest.approx(losses, rel=1e-10), plan
            assert got[2] == pytest.approx(value, rel=1e-10)
            assert all(
                torch.allclose(got[1][n].double(), t.double(), rtol=1e-9) for n, t in state.items()
            )
            divided = plan != "tensor"  # by a loss that is no pair, of which nothing is seen
            assert len(got[3]) == (1 + divided if rank == 0 else 0), got[3]
            if rank == 0:
                assert not divided or "return (sum, weight)" in got[3][1]
                where = (
                    "test_opaque.py:" if kind is Branching else "custom autograd.Function Double"
                )
                assert where in got[3][0] and "plan 'data'" in got[3][0]
                assert "as one component under" not in got[3][0], "for it is so under any plan"


def test_an_explanation_of_an_opaque_model() -> None:
    model = Model(Branching())
    step = trace(model.module, loss, batch(8), training=True)
    assert step.opaque
    plan = Plan.parse("hybrid:tensor=2")
    made = partition(step, plan.layouts(step.chain.names, 4), rows=8)
    found = explain(step, made, plan, 4, 8)
    told = found.document()
    (component,) = told["components"]
    assert component["sharded_parameter_bytes"] == 0
    assert component["not_sharded"] == {}
    assert "test_opaque.py" in told["opaque"]
    assert text(found).count("test_opaque.py") == 1 and "plan 'data'" in text(found)
    assert told["edges"] == []


def switched() -> tuple[list[float], list[str]]:
    model = Straight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, optimizer, loss, batch(8), "data")
        out = [float(trainer.step(trainer.shard(batch(8, 1))))]
        trainer.switch("tensor")
        out.append(float(trainer.step(trainer.shard(batch(8, 2)))))
        faults = []
        try:
            trainer.switch("data; first=tensor")
        except ValueError as error:
            faults.append(str(error))
    trainer.close()
    return out, faults


def test_opaque_models_switch() -> None:
    losses = eager_sgd()
    with shared(Straight, Straight(), loss, batch(8), "data", "data; first=tensor"):
        answers = run(2, switched)
    for got, faults in answers:
        assert got == pytest.approx(losses, rel=1e-10)
        assert len(faults) <= 1


def eager_sgd() -> list[float]:
    model = Straight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for i in (1, 2):
        optimizer.zero_grad()
        value = loss(model, batch(8, i))
        value.backward()
        optimizer.step()
        out.append(value.item())
    return out


def of_pair(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    each = F.cross_entropy(model(b[0]), b[1], reduction="none")
    return each.sum(), torch.tensor(float(len(each)))


def found(loss: Any) -> tuple[str, float, list[str]]:
    model = Straight()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = prepare(model, optimizer, loss, batch(8), "auto")
    value = float(trainer.step(trainer.shard(batch(8, 1))))
    plan = str(trainer.plan)
    trainer.close()
    return plan, value, [str(w.message) for w in told if "may be another one" in str(w.message)]


@pytest.mark.parametrize(("loss", "plan"), [(loss, "single"), (of_pair, "data")])
def test_auto_divides_rows_of_a_pair_alone(loss: Any, plan: str) -> None:
    for answer in run(2, found, loss):
        assert answer == (plan, pytest.approx(eager_sgd()[0], rel=1e-10), [])


class Counting(nn.Module):
    """Keeps what a forward may change: a tensor of other strides, a buffer, a number, a list."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), float(rank)))
        self.register_buffer("seen", torch.full((3, 2), float(rank)).t())
        self.kept, self.count, self.names = torch.full((2,), float(rank)), rank, [rank]

    def forward(self, x: Tensor) -> Tensor:
        return x


def broadcast() -> tuple[dict[str, Any], str]:
    """What ranks have of a model when rank 1 has told rank 2, and what is said of a list."""
    world = World.open("cpu")
    model = Model(module := Counting(world.rank))
    names = ["count", "seen", "weight", "kept", "other"]
    broadcast_state(model, names, world.everyone, 1, [2])
    with pytest.raises(ValueError) as refused:
        broadcast_state(model, ["names"], world.everyone, 1, [2])
    world.close()
    tensors = {n: set(getattr(module, n).flatten().tolist()) for n in ("weight", "seen", "kept")}
    return {**tensors, "count": module.count, "names": module.names}, str(refused.value)


def test_what_a_forward_changes_comes_to_the_ranks_that_ask_for_it() -> None:
    for rank, (has, said) in enumerate(run(3, broadcast)):
        value = 1 if rank == 2 else rank
        tensors = {name: {float(value)} for name in ("weight", "seen", "kept")}
        assert has == {**tensors, "count": value, "names": [rank]}
        assert said.startswith("the forward changes names, a container that ranks which did not")
