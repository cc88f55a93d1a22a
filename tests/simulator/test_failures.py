"""Failures: walks beside closed forms, what each recovery does, records of instances."""

import itertools
from math import inf, sqrt
from pathlib import Path
from statistics import mean

import pytest

from synchromesh.simulator.failures import (
    DAY,
    Checkpoints,
    FailureOutcome,
    Presence,
    Recovery,
    Training,
    best_interval,
    expected_share,
    failures_a_second,
)
from tests.published import published

MONTH = 30 * DAY


def shares(training: Training, seeds: int = 100, seconds: float = MONTH) -> list[FailureOutcome]:
    outcomes = [training.run(seconds, seed) for seed in range(seeds)]
    for o in outcomes:
        parts = o.lost + o.writing + o.down + o.waiting
        if training.recovery.kind != "continue":  # there also hosts are missing
            assert o.useful + parts == pytest.approx(o.seconds)
        assert o.useful + parts <= o.seconds * (1 + 1e-9)
    return outcomes


def test_failures_are_as_far_apart_as_their_rate_says() -> None:
    """Kokolis et al. 2025 project 1.8 h for 16,384 devices and 0.23 h for 131,072, 8 a host."""
    rate, at_once = failures_a_second(6.50), Recovery(detection=0.0, seconds=0.0)
    for devices, hours in ((16_384, 1.80), (131_072, 0.225)):
        training = Training(devices // 8, rate, Checkpoints(600.0, 0.0), at_once)
        assert training.mean_between / 3600 == pytest.approx(hours, abs=0.005)
        count = mean(o.restarts for o in shares(training, 20))
        assert MONTH / count == pytest.approx(training.mean_between, rel=0.05)


@pytest.mark.parametrize(
    "interval, writing, down", [(600, 20, 300), (1800, 60, 0), (3600, 0, 900)]
)
@pytest.mark.parametrize("hosts", [64, 2048])
def test_useful_time_is_what_is_expected(
    hosts: int, interval: float, writing: float, down: float
) -> None:
    checkpoints = Checkpoints(interval, writing)
    training = Training(
        hosts, failures_a_second(6.5), checkpoints, Recovery(detection=0.0, seconds=down)
    )
    found = mean(o.useful_share for o in shares(training))
    assert found == pytest.approx(
        expected_share(training.mean_between, down, checkpoints), abs=0.004
    )
    # (1 - N r (u0 + dt/2)) / (1 + w/dt), published for failures that are rare
    lost = (down + interval / 2) / training.mean_between
    if lost < 0.1:
        assert found == pytest.approx((1 - lost) / (1 + writing / interval), abs=0.01)


@pytest.mark.parametrize("mean_between, writing", [(6480.0, 10.0), (6480.0, 100.0), (1e6, 300.0)])
def test_the_best_interval_is_the_best(mean_between: float, writing: float) -> None:
    best = best_interval(mean_between, writing)
    assert best == pytest.approx(sqrt(2 * mean_between * writing), rel=0.1)
    highest = expected_share(mean_between, 300.0, Checkpoints(best, writing))
    for factor in (0.9, 0.99, 1.01, 1.1):
        other = Checkpoints(factor * best, writing)
        assert expected_share(mean_between, 300.0, other) < highest


def test_without_failures_checkpoints_alone_take_time() -> None:
    training = Training(8, 0.0, Checkpoints(90.0, 10.0))
    outcome = training.run(1000.0, 0)
    assert (outcome.useful, outcome.writing, outcome.restarts) == (900.0, 100.0, 0)
    assert best_interval(inf, 10.0) == inf
    assert expected_share(inf, 300.0, Checkpoints(90.0, 10.0)) == 0.9
    never = Training(8, 0.0, Checkpoints(inf, 10.0)).run(1000.0, 0)
    assert (never.useful, never.writing) == (1000.0, 0.0)


def test_the_same_seed_gives_the_same_numbers() -> None:
    training = Training(512, failures_a_second(6.5), Checkpoints(600.0, 5.0))
    assert training.run(MONTH, 3) == training.run(MONTH, 3) != training.run(MONTH, 4)


def test_spares_wait_for_repairs_where_too_few_are_left() -> None:
    """Down for as long as hosts are replaced; with many spares as if there were others at once."""
    rate, points = failures_a_second(6.5), Checkpoints(600.0, 5.0)
    of = {
        spares: Training(1024, rate, points, Recovery("spares", spares, repair=DAY))
        for spares in (0, 4, 8, 40)
    }
    useful = {s: mean(o.useful_share for o in shares(t, 20)) for s, t in of.items()}
    assert useful[0] < useful[4] < useful[8] < useful[40]
    at_once = Training(1024, rate, points, Recovery())
    assert useful[40] == pytest.approx(mean(o.useful_share for o in shares(at_once, 20)), abs=0.01)
    # in turns: up for M, then down until the repair is over
    alone = Training(1, 1000 * rate, Checkpoints(inf, 0.0), Recovery("spares", 0, 0, 0, DAY, True))
    found = mean(o.useful_share for o in shares(alone, 200))
    up = alone.mean_between
    assert found == pytest.approx(up / (up + DAY), abs=0.02)


def test_training_goes_on_with_fewer_hosts() -> None:
    """Machines that are repaired one by one: each is there for M / (M + repair) of the time."""
    recovery = Recovery("continue", detection=0.0, seconds=0.0, repair=DAY, keeps=True)
    training = Training(16, failures_a_second(50.0), Checkpoints(inf, 0.0), recovery)
    found = mean(o.useful_share for o in shares(training, 50, 10 * MONTH))
    there = 20 * DAY / (20 * DAY + DAY)
    assert found == pytest.approx(there, abs=0.005)
    alone = 20 / 16 / (20 / 16 + 1)  # days until one fails, and until it is back
    with_all = Training(
        16, failures_a_second(50.0), Checkpoints(inf, 0.0), recovery,
        speed=lambda hosts: float(hosts == 16),
    )  # fmt: skip
    assert mean(o.useful_share for o in shares(with_all, 50)) == pytest.approx(alone, abs=0.02)


def test_a_record_of_instances_is_followed() -> None:
    record = Presence((0.0, 100.0, 300.0, 400.0), (4, 2, 4, 4))
    nothing = Recovery("continue", detection=10.0, seconds=20.0)
    outcome = Training(4, 0.0, Checkpoints(30.0, 0.0), nothing, presence=record).run(500.0, 0)
    # 90 of 100 s saved, 10 lost; 170 s of a half; 20 s to come back, 180 s
    assert (outcome.lost, outcome.down, outcome.restarts) == (10.0, 50.0, 1)
    assert outcome.useful == pytest.approx(90 + 170 / 2 + 180)
    waits = Training(
        4, 0.0, Checkpoints(30.0, 0.0), Recovery("restart", 0, 10, 20), presence=record
    )
    outcome = waits.run(500.0, 0)
    assert (outcome.waiting, outcome.down, outcome.lost) == (200.0, 30.0, 10.0)
    assert outcome.useful == pytest.approx(90 + 170)


def test_a_published_record_is_read() -> None:
    record = Presence.load(published("spot_trace_g4dn.csv"))
    assert record.counts[0] == 4 and max(record.counts) == 12
    training = Training(12, 0.0, Checkpoints(600.0, 10.0), Recovery("continue"), presence=record)
    (outcome,) = shares(training, 1, record.seconds[-1])
    there = sum(
        count * (until - since)
        for (since, until), count in zip(
            itertools.pairwise(record.seconds), record.counts, strict=False
        )
    ) / (12 * record.seconds[-1])
    assert 0.0 < outcome.useful_share < there <= 1.0


@pytest.mark.parametrize(
    "text, fault",
    [
        ("", "line 1 should read `seconds,instances`"),
        ("seconds,instances\n", "line 2: there is nothing"),
        ("seconds,instances\n0,4\n5,x\n", "line 3 should be `seconds,instances`"),
        ("seconds,instances\n5,4\n0,4\n", "line 3: seconds ascend"),
        ("seconds,instances\n0,-4\n", "line 2 should be"),
        ("seconds,instances\nnan,4\n", "line 2 should be `seconds,instances`, both from 0"),
    ],
)
def test_a_record_that_is_none_is_refused(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "record.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=fault):
        Presence.load(path)


def test_words_and_rates_that_are_none_are_refused() -> None:
    assert Recovery.parse("spares:2") == ("spares", 2)
    assert Recovery.parse("continue") == ("continue", 0)
    for text in ("spares", "restart:2", "spares:-1", "resume", ""):
        with pytest.raises(ValueError, match="restart, spares:COUNT or continue"):
            Recovery.parse(text)
    for rate in (-1.0, inf, float("nan")):
        with pytest.raises(ValueError, match="a rate is a number from 0"):
            failures_a_second(rate)
    with pytest.raises(ValueError, match="cannot be read"):
        Presence.load(Path("nowhere.csv"))
