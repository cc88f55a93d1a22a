"""Trials on steps whose seconds are made up: the quickest plan stays, at little cost."""

import pytest

from synchromesh.adapt.monitor import LIMITS, Table
from synchromesh.adapt.trials import TUNING, Trials
from synchromesh.planner.candidate import Candidate
from synchromesh.values.plan import Plan
from tests.adapt.simulation import candidate

STEPS = LIMITS.settle + TUNING.steps


def trained(
    predicted: dict[str, float],
    taken: dict[str, float],
    steps: int = 1000,
    move: float = 0.0,
    noise: float = 0.0,
) -> list[tuple[str, str]]:
    """(plan, why) of each switch in a run. noise: every other step takes so much of itself
    longer."""
    trials = Trials([candidate(plan, seconds) for plan, seconds in predicted.items()])
    plan, found = next(iter(predicted)), list[tuple[str, str]]()
    counted: list[Table] = []
    for step in range(min(steps, 200)):
        counted.append([(taken[plan] * (1 + noise * (step % 2)), 0.0)])
        now = trials.next(Plan.parse(plan), counted, steps - step, lambda _: move)
        if now is not None:
            assert len(counted) == TUNING.steps
            plan, counted = str(now[0]), []
            found.append((plan, now[1]))
    assert trials.over and trials.next(Plan.parse(plan), counted, 1, lambda _: move) is None
    return found


PREDICTED = {"data": 1.0, "tensor": 1.1, "hybrid:tensor=2": 1.05, "single": 1.3}


@pytest.mark.parametrize(
    ("taken", "last"),
    [
        ((1.0, 0.9, 1.2), ["tensor"]),  # which is in force already: tried last
        ((1.0, 1.2, 0.9), ["tensor", "hybrid:tensor=2"]),
        ((1.0, 1.2, 1.1), ["tensor", "data"]),
        ((1.0, 0.99, 0.985), ["tensor", "data"]),  # no gain that could not be noise
    ],
)
def test_the_plan_under_which_steps_take_least_stays(
    taken: tuple[float, float, float], last: list[str]
) -> None:
    found = trained(
        PREDICTED, dict(zip(("data", "tensor", "hybrid:tensor=2"), taken, strict=True))
    )
    assert [plan for plan, _ in found] == ["hybrid:tensor=2", *last], (
        "the near ones, by prediction"
    )
    assert found[0][1] == "tried, as 1050 ms a step are predicted"
    if len(last) > 1:
        assert found[-1][1] == "of 3 plans that were tried the quickest"


def test_what_lies_within_noise_is_no_gain() -> None:
    taken = {"data": 1.0, "hybrid:tensor=2": 0.95, "tensor": 0.96}
    assert trained(PREDICTED, taken)[-1][0] == "hybrid:tensor=2"
    assert trained(PREDICTED, taken, noise=0.1)[-1][0] == "data"


def test_what_is_not_near_or_does_not_fit_is_not_tried() -> None:
    assert Trials([]).over
    others = [candidate("tensor", 1.01, fits=False), candidate("single", 1 + TUNING.near)]
    assert Trials([candidate("data", 1.0), *others]).over
    assert Trials([Candidate(Plan.parse("data"), None, (), True, ""), *others]).over
    many = [candidate(f"data; @micro_batches={n}", 1 + n / 1000) for n in range(1, 9)]
    taken = {str(c.plan): 1.0 + i for i, c in enumerate(many)}
    found = trained({str(c.plan): c.seconds for c in many}, taken)
    assert len(found) == TUNING.most + 1 and found[-1][0] == str(many[0].plan)


def test_trials_take_a_small_share_of_the_run() -> None:
    taken = dict.fromkeys(PREDICTED, 1.0)
    each = STEPS * 1.05 / TUNING.share  # steps that a run needs for one of them
    assert trained(PREDICTED, taken, steps=int(each)) == []
    assert len(trained(PREDICTED, taken, steps=int(each + 2 * STEPS))) == 2, "there and back"
    assert trained(PREDICTED, taken, move=100.0) == []


def test_steps_that_count_as_one_are_so_many_of_the_run() -> None:
    local = {"data": 1.0, "data; @synchronisation=local:8": 1.05}
    taken = {"data": 1.0, "data; @synchronisation=local:8": 0.5}
    each = 8 * STEPS * 1.05 / TUNING.share
    assert len(trained(local, taken, steps=int(each) + TUNING.steps + 1)) == 1
    assert not trained(local, taken, steps=int(each) - 1)


def test_short_steps_are_counted_longer() -> None:
    """Outliers in five steps of 2 ms decide nothing: a trial lasts as long as its steps tell."""
    trials = Trials([candidate("data", 0.002), candidate("tensor", 0.0021)])
    counted: list[Table] = [[(0.002, 0.0)]] * TUNING.steps
    calls = 1
    while trials.next(Plan.parse("data"), counted, 10_000, lambda _: 0.001) is None:
        calls += 1
    assert TUNING.steps + calls - 1 == TUNING.most_steps == len(trials.tables[Plan.parse("data")])


def test_a_switch_of_somebody_else_ends_them() -> None:
    trials = Trials([candidate(plan, seconds) for plan, seconds in PREDICTED.items()])
    assert not trials.over
    assert trials.next(Plan.parse("single"), [], 1000, lambda _: 0.0) is None and trials.over
