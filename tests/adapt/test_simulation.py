"""The adapter on steps that are made up (simulation.py): a change is noticed wherever it comes, in
trials, in what is learnt, right after a switch, and when it goes; quiet runs are left alone; what
follows is the right plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synchromesh.adapt.monitor import LIMITS
from synchromesh.values.plan import Plan
from tests.adapt.simulation import CALM, PLANS, QUIET, RANKS, ROUGH, Noise, Outcome, simulate

WITHIN = 12  # steps after the change
UNKNOWN = LIMITS.settle + LIMITS.earlier  # steps of a plan after which it is known what it takes
AFTERWARDS = 110  # steps in which trials are over too
Conditions = tuple[tuple[float, ...], float]


def conditions(kind: str, factor: float) -> Conditions:
    """Such that a step of data parallelism takes about `factor` times as long."""
    match kind:
        case "devices":
            return (2 * factor - 1,) * RANKS, 1.0
        case "device":
            return (*QUIET[0][:-1], 2 * factor - 1), 1.0
    return QUIET[0], 3 * factor - 2


def felt(outcome: Outcome, at: int, before: Conditions, after: Conditions) -> float:
    """How many times as long as expected steps took, at least, under the plans that were in force
    in the steps in which a change at `at` must be noticed: as long as before, or as predicted
    where a plan had not run yet."""
    found, run = [], outcome.run
    starts = [0, *(d.step for d in outcome.decisions), 10**9]
    plans = [outcome.first, *(Plan.parse(d.plan_to) for d in outcome.decisions)]
    ratios = [1.0, *(d.measured_before / d.predicted_before for d in outcome.decisions)]
    for plan, start, stop, ratio in zip(plans, starts, starts[1:], ratios, strict=False):
        if start <= at + WITHIN and stop > at:
            usual, now = PLANS[plan].under(*before), PLANS[plan].under(*after)
            predicted = usual * (1 + run.errors[plan])
            fresh = [predicted, predicted * ratio] if at < start + UNKNOWN else []
            found.append(now / max([usual, *fresh]) if now > usual else min([usual, *fresh]) / now)
    return min(found)


def noticed(outcome: Outcome, at: int) -> int:
    """Steps after the change that counted."""
    step = next((d.step for d in outcome.drifts if d.step >= at), 10**9)
    return step - at - sum(at <= s < step for s in outcome.short)


KINDS = st.sampled_from(["devices", "device", "links"])
FACTORS = st.sampled_from([1.3, 1.5, 1.8, 2.5, 5.0, 10.0])
NOISE = st.sampled_from([CALM, ROUGH])


@settings(max_examples=120, derandomize=True, deadline=None)
@given(st.integers(0, 200), KINDS, FACTORS, NOISE, st.integers(0, 9999))
def test_a_change_is_noticed_wherever_it_comes(
    at: int, kind: str, factor: float, noise: Noise, seed: int
) -> None:
    after = conditions(kind, factor)
    outcome = simulate(at + AFTERWARDS, {at: after}, noise, seed)
    times = felt(outcome, at, QUIET, after)
    if times >= 1.5:
        assert noticed(outcome, at) <= WITHIN, (times, outcome.decisions)
        assert outcome.regret <= 1.3, outcome.decisions


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.integers(0, 200), st.integers(30, 120), KINDS, FACTORS, NOISE, st.integers(0, 9999))
def test_and_so_is_its_end(
    at: int, steps: int, kind: str, factor: float, noise: Noise, seed: int
) -> None:
    between, back = conditions(kind, factor), at + steps
    outcome = simulate(back + AFTERWARDS, {at: between, back: QUIET}, noise, seed)
    if felt(outcome, back, between, QUIET) >= 1.5:
        assert noticed(outcome, back) <= WITHIN, outcome.decisions


@pytest.mark.parametrize("noise", [CALM, ROUGH, Noise(0.1)])
def test_quiet_runs_are_left_alone(noise: Noise) -> None:
    """10,000 steps in one run, and in twenty."""
    outcomes = [simulate(500, {}, noise, seed) for seed in range(20)]
    for outcome in (simulate(10_000, {}, noise, 0), *outcomes):
        assert outcome.drifts == []
        assert outcome.regret <= 1.1  # what trials of five steps can tell


def test_a_wrong_prediction_is_no_change() -> None:
    """It is measured again and found as it was; trials go on, and what the plan takes is known."""
    for seed in range(20):
        outcome = simulate(200, {}, CALM, seed, error=0.3)
        assert len(outcome.drifts) <= 2 and outcome.regret <= 1.1, outcome.decisions


def test_short_steps_are_tried_though_measuring_them_is_never_worth_it() -> None:
    """Steps of 5 ms, of nobody knows how many, of which the first ones take twice as long: what
    was noticed waits, plans are tried all the same."""
    slow = {0: conditions("devices", 2.0), 12: QUIET}
    for seed in range(40):
        outcome = simulate(400, slow, ROUGH, seed, error=0.1, to_come=0, scale=0.05)
        assert all(d.measuring_seconds == 0 for d in outcome.decisions)
        assert outcome.regret <= 1.06, outcome.decisions  # two plans lie 5 % apart


def test_what_trials_found_before_a_change_is_not_compared_with_what_comes_after() -> None:
    """In the second trial all devices become three times as slow: the first plan is not taken for
    three times as quick."""
    for at in range(9, 16):
        outcome = simulate(at + AFTERWARDS, {at: conditions("devices", 3.0)}, CALM, at)
        assert noticed(outcome, at) <= WITHIN
        tried = [d for d in outcome.decisions if d.noticed.startswith("plans are predicted")]
        compared = [d for d in tried if "quickest" in d.reason]
        assert all(d.step > at + WITHIN for d in compared) and outcome.regret <= 1.05
