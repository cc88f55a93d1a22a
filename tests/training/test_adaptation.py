"""An adaptation: costs of steps for the adapter, and batches of another size."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from synchromesh.adapt.adapter import Adapter
from synchromesh.planning.other_ranks import Prepared
from synchromesh.training.adaptation import NO_COST, Adaptation
from synchromesh.training.execution import Execution
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@pytest.fixture
def adaptation() -> Adaptation:
    """Of rank 0 of three, where rank 1 is idle and plans are made for 12 rows."""
    groups = SimpleNamespace(ranks=(0, 2))
    execution = SimpleNamespace(
        active=SimpleNamespace(plan=Plan.parse("data"), step=None, partition=None, groups=groups),
        planning=SimpleNamespace(
            rows=12, facts=lambda step: None, prepared=Prepared(Plan.parse("data"))
        ),
        pieces=SimpleNamespace(possible=False, chosen=1),
        noise=SimpleNamespace(cut=False),
        plan=Plan.parse("data"),
        nothing_to_adapt="",
        world=SimpleNamespace(alone=False, size=3),
    )
    made = Adaptation(cast(Execution, execution), lambda plan: pytest.fail("nothing is switched"))
    made.adapter = Adapter(Profile(2))
    return made


def test_another_size_must_be_that_of_most_batches(adaptation: Adaptation) -> None:
    sizes = [12] * 4 + [24] * (Adaptation.MOST - 1) + [5, 24]
    assert [adaptation._resized(n, 12) for n in sizes] == [False] * (len(sizes) - 1) + [True]


def test_sizes_that_take_turns_are_followed_ever_later(adaptation: Adaptation) -> None:
    """Each change takes twice as many batches as the one before."""
    planned, other, taken = 12, 24, []
    for _ in range(4):
        count = 1
        while not adaptation._resized(other, planned):
            count += 1
        taken.append(count)
        planned, other = other, planned
    assert taken == [Adaptation.MOST * 2**i for i in range(4)]


def test_the_adapter_sees_steps_that_every_rank_has_counted(
    adaptation: Adaptation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []
    monkeypatch.setattr(adaptation.adapter, "record", lambda table, ranks: tables.append(table))
    monkeypatch.setattr(adaptation.adapter, "act", lambda run, step, to_come: None)
    adaptation.note(0.5, 0.2, 12, 1, 0)
    assert adaptation.cost == (300_000, 200_000)
    adaptation.collect([(1, 2), NO_COST, (3, 0)])  # rank 1 is idle
    assert tables == [[(1, 2), (3, 0)]] and adaptation.cost == NO_COST
    adaptation.collect([(1, 2), (4, 0), NO_COST])  # rank 2 has a part, but its step was a trial
    assert len(tables) == 1
    adaptation.note(0.1, 0.2, 12, 2, 0)  # a wait may end after the clock was read
    assert adaptation.cost == (0, 100_000)
    adaptation.restart()
    adaptation.note(0.1, 0.2, 5, 3, 0)
    assert adaptation.cost == NO_COST, "the batch is short"


def test_steps_until_a_mean_of_parameters_count_as_one(
    adaptation: Adaptation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four send nothing: their median would say nothing of the mean."""
    monkeypatch.setattr(adaptation.adapter, "act", lambda run, step, to_come: None)
    adaptation._execution.active.plan = Plan.parse("data; @synchronisation=local:4")  # type: ignore[misc]
    costs = []
    for step in range(8):
        adaptation.note(0.125 + 0.5 * (step % 4 == 3), 0.5 * (step % 4 == 3), 12, step, 0)
        costs.append(adaptation.cost)
        adaptation.collect([NO_COST] * 3)
    assert costs == [*[NO_COST] * 3, (125_000, 125_000)] * 2
    adaptation.note(0.1, 0.0, 12, 9, 0)
    adaptation.restart()
    assert adaptation._costs == [], "another plan is in force"
