"""The monitor: it speaks when steps are not what was expected, says whether devices or links have
changed, and is quiet otherwise. How soon, and how rarely in vain, is of test_simulation.py."""

import pytest

from synchromesh.adapt.monitor import LIMITS, Drift, Monitor, Table

QUIET: Table = [(0.2, 0.1), (0.21, 0.09)]  # of two ranks: seconds computing, seconds waiting
SLOW: Table = [(0.2, 0.5), (0.21, 0.49)]
NOTICED = LIMITS.window  # steps within which a change of all of them is noticed


def recorded(monitor: Monitor, table: Table, steps: int) -> list[Drift | None]:
    return [monitor.record(table) for _ in range(steps)]


def learned(table: Table = QUIET) -> Monitor:
    monitor = Monitor()
    steps = LIMITS.settle + LIMITS.base + LIMITS.window
    assert recorded(monitor, table, steps) == [None] * steps
    return monitor


def first(found: list[Drift | None]) -> tuple[int, Drift]:
    return next((i + 1, d) for i, d in enumerate(found) if d is not None)


def test_slower_links_are_noticed_within_a_window() -> None:
    steps, drift = first(recorded(learned(), SLOW, 20))
    assert steps <= NOTICED
    assert drift.links and not drift.devices and drift.now == pytest.approx(0.7)
    assert "300 ms were usual; waiting for traffic explains 100%" in str(drift)


def test_a_slower_device_is_named() -> None:
    _, drift = first(recorded(learned(), [(0.2, 0.4), (0.6, 0.0)], 20))
    assert drift.devices and "rank 1 computes 2.9 times as long" in str(drift)
    monitor = learned()
    found = [monitor.record([(0.2, 0.4), (0.6, 0.0)], (2, 5)) for _ in range(20)]
    assert "rank 5 computes" in str(first(found)[1])


def test_a_device_that_is_quick_again_is_noticed_although_steps_stay() -> None:
    """Its rows are few: it waits for the others instead."""
    _, drift = first(recorded(learned(), [(0.2, 0.1), (0.07, 0.23)], 20))
    assert drift.now == pytest.approx(0.3) and drift.devices and not drift.links
    assert "rank 1 computes 0.3 times as long" in str(drift)


def test_faster_links_are_noticed_too() -> None:
    _, drift = first(recorded(learned([(0.2, 0.8), (0.2, 0.8)]), [(0.2, 0.1), (0.2, 0.1)], 20))
    assert drift.now == pytest.approx(0.3) and not drift.devices


def test_what_was_predicted_is_expected_from_the_first_step_on() -> None:
    monitor = Monitor()
    monitor.follow([0.25, 0.3])
    assert recorded(monitor, QUIET, 60) == [None] * 60
    monitor.follow([0.25, 0.3])
    steps, drift = first(recorded(monitor, SLOW, 20))
    assert steps <= LIMITS.settle + NOTICED
    assert drift.devices and drift.links and drift.source == "predicted"
    assert str(drift) == "steps take 700 ms, 300 ms were expected"


def test_what_a_plan_took_in_its_trial_is_expected_of_it() -> None:
    monitor = Monitor()
    monitor.follow([0.3], [QUIET] * 5)
    steps, drift = first(recorded(monitor, SLOW, 20))
    assert steps <= LIMITS.settle + NOTICED and "300 ms were usual" in str(drift)


@pytest.mark.parametrize("before", range(LIMITS.earlier, LIMITS.base))
def test_a_change_while_learning_is_found(before: int) -> None:
    """Nothing was predicted: the halves of what is learnt differ."""
    monitor = Monitor()
    recorded(monitor, QUIET, LIMITS.settle + before)
    steps, drift = first(recorded(monitor, SLOW, 40))
    assert steps <= 12 and drift.expected == pytest.approx(0.3)


def test_what_is_accepted_becomes_usual_at_once() -> None:
    monitor = learned()
    first(recorded(monitor, SLOW, 20))
    monitor.accept()
    assert recorded(monitor, SLOW, 100) == [None] * 100
    monitor.accept()
    assert first(recorded(monitor, QUIET, 20))[0] <= NOTICED


def test_outliers_and_a_pause_are_no_drift() -> None:
    monitor = learned()
    for i in range(200):
        slow = i % LIMITS.window < 3  # three of every eight
        assert monitor.record([(0.2, 3.0), (0.2, 3.0)] if slow else QUIET) is None


def test_what_creeps_is_noticed() -> None:
    """What is usual is not learnt for ever."""
    monitor = learned()
    creeping = [[(0.2 * 1.003**i, 0.1), (0.21 * 1.003**i, 0.09)] for i in range(400)]
    assert any(monitor.record(table) for table in creeping)


def test_a_trial_is_steady_where_its_first_and_last_steps_agree() -> None:
    monitor = Monitor()
    recorded(monitor, QUIET, LIMITS.settle + LIMITS.measured - 1)
    assert monitor.steady and monitor.measured is None
    recorded(monitor, SLOW, 3)
    assert not monitor.steady
    monitor = learned()
    assert monitor.steady and monitor.measured == pytest.approx(0.3)
    assert monitor.latest == pytest.approx(0.3)
