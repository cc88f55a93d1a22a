"""The choice on live ranks: the same everywhere, without a trace in what is trained, and never the
reason why training fails."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from synchromesh import prepare
from synchromesh.measure import facts as facts_module
from tests import models
from tests.measure.hurried import hurried
from tests.models import FAMILIES
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
    assert all(head["step_seconds"] <= c["step_seconds"] * 1.021 for c in rest if c["fits"])


def unmeasurable(name: str) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()

    def fails(*_: Any) -> Any:
        raise RuntimeError("not enough memory: you tried to allocate 8 bytes")

    patch.setattr(facts_module, "record", fails)
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
