"""The monitor: it speaks when steps have changed, says whether devices or links have, and is quiet
otherwise."""

import random

import pytest

from synchromesh.adapt.monitor import LIMITS, Cost, Drift, Monitor

QUIET = [(0.2, 0.1), (0.21, 0.09)]  # of two ranks: seconds computing, seconds waiting


def recorded(monitor: Monitor, table: list[Cost], steps: int) -> list[Drift | None]:
    return [monitor.record(table) for _ in range(steps)]


def learned(table: list[Cost] = QUIET) -> Monitor:
    monitor = Monitor()
    steps = LIMITS.settle + LIMITS.base + LIMITS.window
    assert recorded(monitor, table, steps) == [None] * steps
    return monitor


def first(found: list[Drift | None]) -> tuple[int, Drift]:
    return next((i, d) for i, d in enumerate(found) if d is not None)


def test_slower_links_are_noticed_within_a_window() -> None:
    steps, drift = first(recorded(learned(), [(0.2, 0.5), (0.21, 0.49)], 20))
    assert steps < LIMITS.window + LIMITS.confirm
    assert not drift.device_drift and drift.now == pytest.approx(0.7)
    assert "traffic explains 100%" in str(drift)


def test_a_slower_device_is_named() -> None:
    _, drift = first(recorded(learned(), [(0.2, 0.4), (0.6, 0.0)], 20))
    assert drift.device_drift and "rank 1 computes 2.9 times as long" in str(drift)


def test_a_device_that_is_quick_again_is_noticed_although_steps_stay() -> None:
    """Its rows are few: it waits for the others instead."""
    _, drift = first(recorded(learned(), [(0.2, 0.1), (0.07, 0.23)], 20))
    assert drift.now == pytest.approx(0.3) and drift.device_drift and not drift.link_drift
    assert "rank 1 computes 0.3 times as long" in str(drift)


def test_faster_links_are_noticed_too() -> None:
    _, drift = first(recorded(learned([(0.2, 0.8), (0.2, 0.8)]), [(0.2, 0.1), (0.2, 0.1)], 20))
    assert drift.now == pytest.approx(0.3) and not drift.device_drift


def test_what_is_new_becomes_usual_after_a_reset() -> None:
    monitor = learned()
    slow = [(0.2, 0.5), (0.21, 0.49)]
    first(recorded(monitor, slow, 20))
    monitor.reset()
    assert recorded(monitor, slow, 100) == [None] * 100


def test_outliers_and_a_pause_are_no_drift() -> None:
    monitor = learned()
    for i in range(200):
        slow = i % LIMITS.window < 3  # three of every eight
        assert monitor.record([(0.2, 3.0), (0.2, 3.0)] if slow else QUIET) is None


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_noise_raises_no_false_alarm(noise: float) -> None:
    """20 runs of 500 quiet steps, each step off by a normal draw on every rank."""
    chance = random.Random(0)
    alarms = 0
    for _ in range(20):
        monitor = Monitor()
        for _ in range(500):
            table = [(c * (1 + chance.gauss(0, noise)), w) for c, w in QUIET]
            alarms += monitor.record(table) is not None
    assert alarms == 0
