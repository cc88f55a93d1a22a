"""The adapter on real ranks: a drift leads to the same decision on all, at the same step, and a
switch does not show in the losses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from synchromesh import prepare
from synchromesh.adapt import adapter as adapting
from synchromesh.adapt.monitor import Drift
from synchromesh.choosing import Choice, Question
from synchromesh.cost.step_time import StepTime
from synchromesh.plan import Plan
from synchromesh.planner.candidate import Candidate
from synchromesh.profile import Profile
from tests.measure.hurried import hurried
from tests.models import FAMILIES, family
from tests.ranks import run
from tests.traces import shared

STEPS, AT = 8, 4
EXPLAINED = 1.0  # by devices: their programs are timed again


class Told:
    """A monitor that notices something once, at its third step."""

    usual = None

    def __init__(self) -> None:
        self.steps = 0

    def tell(self, table: Any) -> Drift | None:
        self.steps += 1
        assert len(table) in (1, 2) and all(c > 0 and w >= 0 for c, w in table)
        ratios = (1.0,) * len(table)
        return Drift(0.1, 1.0, ratios, EXPLAINED) if self.steps == 3 else None

    def reset(self) -> None:
        pass


def candidate(plan: str, seconds: float) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    return Candidate(Plan.parse(plan), time, (), True, "")


def trained(
    better: str, seconds: float, adapt: bool, first: str = "tensor"
) -> tuple[list[float], list[dict[str, Any]]]:
    """Losses and decisions of a run that was measured under `tensor` and then is under `first`;
    `better` is predicted to take `seconds`, the plan in force 1."""

    def reconsider(question: Question, profile: Profile, current: Plan | None = None) -> Choice:
        assert current is not None
        found = (candidate(better, seconds), candidate(str(current), 1.0))
        return Choice(tuple(sorted(found, key=lambda c: c.seconds)), profile, 0.0)

    patch = pytest.MonkeyPatch()
    patch.setattr(adapting, "reconsider", reconsider)
    model, loss, make = FAMILIES["cnn"]()
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [make(12, seed=i, dtype=torch.float64) for i in range(STEPS)]
    trainer = prepare(model, optimizer, loss, batches[0], plan="tensor; @pieces=1")
    try:
        if adapt:
            trainer.adapt()
            assert trainer.adapter is not None
            trainer.adapter.monitor = Told()  # type: ignore[assignment]
            trainer.steps_to_come = 10_000
        if first != "tensor":
            trainer.switch(f"{first}; @pieces=1")
        losses = [float(trainer.step(trainer.shard(batch))) for batch in batches]
        return losses, [event.to_dict() for event in trainer.decisions]
    finally:
        trainer.close()
        patch.undo()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """One trace for all ranks, and few measurements."""
    model, loss, make = family("cnn")
    with hurried(), shared("cnn", model, loss, make(12, dtype=torch.float64), "tensor"):
        yield


def test_a_better_plan_is_taken_and_the_losses_go_on() -> None:
    (alone, none), _ = run(2, trained, "data; @pieces=1", 0.5, False, timeout=100)
    (losses, events), (others, theirs) = run(2, trained, "data; @pieces=1", 0.5, True, timeout=100)
    assert none == [] and losses == others
    assert losses == pytest.approx(alone, rel=1e-10)
    (event,) = events
    assert event["switched"] and event["step"] == AT == theirs[0]["step"]
    assert (event["from"], event["to"]) == ("tensor; @pieces=1", "data; @pieces=1")
    assert event["bytes_moved"] > 0 and event["pause_seconds"] > 0
    assert event["predicted_before"] == 1.0 and event["predicted_after"] == 0.5


def test_what_is_not_worth_it_stays_and_says_why() -> None:
    (losses, events), _ = run(2, trained, "data; @pieces=1", 0.95, True, timeout=100)
    (event,) = events
    assert not event["switched"] and event["to"] == event["from"] == "tensor; @pieces=1"
    assert "no plan is 8% quicker" in event["reason"] and len(losses) == STEPS


def test_one_device_is_left_for_all_where_that_pays() -> None:
    """All ranks take part in sampling and switching, also those that were idle."""
    (losses, events), (_, theirs) = run(
        2, trained, "data; @pieces=1", 0.5, True, "single", timeout=100
    )
    (event,) = events
    assert event["switched"] and event["to"] == "data; @pieces=1" == theirs[0]["to"]
    assert len(losses) == STEPS
