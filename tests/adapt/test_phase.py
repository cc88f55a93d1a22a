"""The phase: what is tried and what waits, by every way from one to the next."""

import pytest

from synchromesh.adapt.monitor import Drift, Source
from synchromesh.adapt.phase import Phase
from synchromesh.values.plan import Plan
from tests.adapt.simulation import candidate

CHOSEN, SECOND = candidate("data", 1.0), candidate("tensor", 1.05)
NEAR = (CHOSEN, SECOND, candidate("single", 9.0))


def drift(source: Source | None = "usual", *, devices: bool = True) -> Drift:
    return Drift(1.0, 2.0, devices, not devices, "steps take 2000 ms", source)


def test_near_plans_are_tried_else_the_plan_is_watched() -> None:
    assert Phase.of(NEAR).trying
    assert not Phase().trying and not Phase.of(()).trying and not Phase.of(NEAR[::2]).trying


@pytest.mark.parametrize("source, doubted", [("predicted", True), ("usual", False), (None, False)])
def test_a_prediction_is_doubted_while_plans_are_tried(
    source: Source | None, doubted: bool
) -> None:
    assert Phase.of(NEAR).doubts(drift(source)) == doubted
    assert not Phase().doubts(drift(source)), "nothing is tried that would tell"
    assert not Phase.of(NEAR).postponed(drift(), 20, CHOSEN.plan).doubts(drift(source))


def test_what_waits_is_due_at_its_step_and_reported_once() -> None:
    first = Phase.of(NEAR)
    assert first.due(0) is None and not first.reported
    waits = first.postponed(drift(), 20, CHOSEN.plan)
    assert waits.due(19) is None and waits.due(20) == drift() and waits.reported
    again = waits.postponed(drift(devices=False), 40, CHOSEN.plan)
    assert again.due(20) is None and again.due(40) == drift(), "what waited, asked again later"
    resized = Phase(waiting=drift())
    assert resized.due(0) == drift() and not resized.reported, "nothing was said of it yet"


def test_trials_begin_anew_with_the_plan_in_force() -> None:
    waits = Phase.of(NEAR).postponed(drift(), 20, SECOND.plan)
    assert waits.trying and waits.trials.left(SECOND.plan)[0] == SECOND
    assert not Phase().postponed(drift(), 20, SECOND.plan).trying, "they had come to an end"
    elsewhere = Phase.of(NEAR).postponed(drift(), 20, Plan.parse("data; head=tensor"))
    assert not elsewhere.trying, "the plan in force is none of them"


def test_what_is_noticed_meanwhile_is_measured_with_it() -> None:
    waits = Phase.of(NEAR).postponed(drift(), 20, CHOSEN.plan)
    both = waits.joined(drift(devices=False), CHOSEN.plan)
    assert both.waiting is not None and both.until == 20
    assert both.waiting.devices and both.waiting.links
    assert both.trying and both.trials is not waits.trials


def test_another_plan_in_force_ends_what_waits_and_no_trials() -> None:
    trying = Phase.of(NEAR)
    assert trying.restarted() is trying
    watching = trying.postponed(drift(), 20, CHOSEN.plan).restarted()
    assert watching.waiting is None and not watching.trying
