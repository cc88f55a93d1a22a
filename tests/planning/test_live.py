"""The choice on live ranks: the same everywhere, without a trace in what is trained, and never the
reason why training fails."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh import prepare
from synchromesh.engine.world import World
from synchromesh.planner.choice import MARGIN
from synchromesh.profiling import live_facts
from synchromesh.profiling.live_facts import broadcast
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan
from tests import models
from tests.models import FAMILIES
from tests.profiling.hurried import hurried
from tests.ranks import run
from tests.traces import shared


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One trace for all ranks, and few measurements."""
    model, loss, make = models.family("cnn")
    with hurried(), shared("cnn", model, loss, make(12, dtype=torch.float64), "auto"):
        yield


def chosen(family: str, plan: str = "auto") -> dict[str, Any]:
    model, loss, make = FAMILIES[family]()
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = make(12, seed=1, dtype=torch.float64)
    torch.manual_seed(3)
    trainer = prepare(model, optimizer, loss, batch, plan=plan)
    drawn = float(torch.rand(()))
    losses = [float(trainer.step(trainer.shard(batch))) for _ in range(3)]
    choice = trainer.choice
    told = {
        "plan": str(trainer.plan), "losses": losses, "drawn": drawn,
        "candidates": [] if choice is None else [c.to_dict() for c in choice.candidates],
    }  # fmt: skip
    trainer.close()
    return told


def test_all_ranks_choose_alike_and_training_is_what_it_was() -> None:
    first, second = run(2, chosen, "cnn", timeout=110)
    assert first["candidates"] == second["candidates"] and first["plan"] == second["plan"]
    given, _ = run(2, chosen, "cnn", first["plan"], timeout=110)
    assert first["losses"] == given["losses"], "measuring leaves weights and optimizer alone"
    assert first["drawn"] == given["drawn"], "and the user's random numbers"
    words = {c["plan"].partition(";")[0] for c in first["candidates"]}
    assert {"single", "data", "tensor"} <= words
    head, *rest = first["candidates"]
    assert head["plan"] == first["plan"] and head["fits"] and head["step_seconds"] > 0
    assert all(c["reason"] for c in first["candidates"])
    most = (1.001 + MARGIN) * min(c["step_seconds"] for c in rest if c["fits"])
    assert head["step_seconds"] <= most


def unmeasurable(name: str) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()

    def fails(*_: Any) -> Any:
        raise RuntimeError("not enough memory: you tried to allocate 8 bytes")

    patch.setattr(live_facts, "record", fails)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            told = chosen(name)
        return {**told, "warned": [str(w.message) for w in caught]}
    finally:
        patch.undo()


def test_what_cannot_be_measured_trains_under_data_with_a_warning() -> None:
    first, second = run(2, unmeasurable, "cnn", timeout=110)
    assert first["plan"] == second["plan"] == "data"
    assert any("no plan could be predicted" in w and "allocate" in w for w in first["warned"])
    assert not any("no plan could be predicted" in w for w in second["warned"])
    assert first["losses"] == second["losses"]


def coupled() -> tuple[str, dict[str, str]]:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    optimizer = torch.optim.Adafactor(model.parameters())
    batch = torch.ones(4, 64)
    trainer = prepare(model, optimizer, lambda m, b: m(b).square().mean(), batch)
    trainer.step(trainer.shard(batch))
    assert trainer.choice is not None
    refused = {str(c.plan): c.reason for c in trainer.choice.candidates if not c.fits}
    trainer.close()
    return str(trainer.plan), refused


def test_what_cannot_update_pieces_is_never_given_pieces() -> None:
    (plan, refused), (other, _) = run(2, coupled, timeout=110)
    assert plan == other and plan.partition(";")[0] in ("single", "data")
    assert "Adafactor cannot update pieces" in refused["tensor"]


def faulty() -> tuple[str, str]:
    world = World.open("cpu")

    def fails() -> Any:
        raise ValueError("three is no divisor of four")

    try:
        with pytest.raises(ValueError) as caught:
            broadcast(world, fails)
        return str(caught.value), str(broadcast(world, lambda: {"of": world.rank}))
    finally:
        world.close()


def test_what_rank_0_fails_at_fails_on_all() -> None:
    assert run(2, faulty) == [("three is no divisor of four", "{'of': 0}")] * 2


def on_the_other(folder: str) -> tuple[str, list[float]]:
    def begun(plan: str) -> Trainer:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return prepare(model, optimizer, lambda m, b: m(b).square().mean(), batch, plan=plan)

    batch = torch.arange(16.0).view(4, 4) / 16
    trainer = begun("single; @ranks=1")
    rows, values = str(trainer.own_rows(4)), [float(trainer.step(trainer.shard(batch)))]
    trainer.save(folder)
    values.append(float(trainer.step(trainer.shard(batch))))
    found = trainer.evaluate(
        [trainer.shard(batch)], lambda m, b: {"sum": m(b).square().mean(1).sum()}
    )
    trainer.switch("data")
    values += [found["sum"], float(trainer.step(trainer.shard(batch)))]
    trainer.close()
    again = begun("single; @ranks=1")
    again.resume(folder)
    values.append(float(again.step(again.shard(batch))))
    again.close()
    return rows, values


def test_one_device_may_be_any(tmp_path: Path) -> None:
    (rows, values), (others, same) = run(2, on_the_other, str(tmp_path / "saved"))
    assert (rows, others) == ("((0, 0),)", "((0, 4),)") and values == same
    first, second, evaluated, third, resumed = values
    assert first > second > third and resumed == second
    assert evaluated == pytest.approx(third), "the same rows before the next update"


def quickest() -> tuple[str, list[str]]:
    model, loss, make = FAMILIES["cnn"]()
    optimizer = torch.optim.SGD(model.double().parameters(), lr=1e-2)
    batch = make(12, dtype=torch.float64)
    trainer = prepare(model, optimizer, loss, batch, plan="data")
    wrong = "data; nowhere=tensor"
    best = trainer.planning.quickest(trainer.traced, ["single", "data", wrong])
    plans = [Plan.parse(text) for text in ("single", "data")]
    predicted = [trainer.planning.predict(trainer.traced, plan) for plan in plans]
    assert best.seconds == min(c.seconds for c in predicted)
    with pytest.raises(ValueError, match="none of these plans can run: data; nowhere=tensor: "):
        trainer.planning.quickest(trainer.traced, [wrong])
    trainer.close()
    return str(best.plan), [str(plan) for plan in plans]


def test_the_quickest_of_several_plans_is_the_same_on_all_ranks() -> None:
    (first, plans), (second, _) = run(2, quickest, timeout=110)
    assert first == second and first in plans
