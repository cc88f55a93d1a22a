"""Runs of several seeds as one, and what may be compared with what."""

from dataclasses import replace

import pytest

from synchromesh.results.groups import RunGroup, Spread, comparisons
from synchromesh.results.run import Epoch, Quartiles, RunResult
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings


def run(strategy: str = "data", devices: int = 2, seed: int = 0, **more: object) -> RunResult:
    plain = RunResult("digits/cnn", strategy, devices, 64, seed, "done")
    return replace(plain, **more)  # type: ignore[arg-type]


def timed(*medians: float, spread: float = 0.0) -> RunGroup:
    """A group with a seed for each median, whose quartiles are `spread` away."""
    steps = [Quartiles(m, m - spread, m + spread) for m in medians]
    return RunGroup(tuple(run(seed=i, step_seconds=q) for i, q in enumerate(steps)))


def test_times_of_seeds_are_medians() -> None:
    group = timed(0.2, 0.3, 9.0, spread=0.01)
    assert group.step_seconds == Quartiles(0.3, 0.29, 0.31)
    assert RunGroup((run(status="failed"),)).step_seconds is None
    assert group.median(lambda r: r.utilisation) is None


def test_an_epoch_takes_what_was_measured_or_its_steps() -> None:
    measured = Quartiles(5.0, 4.0, 6.0)
    of_steps = replace(timed(0.2, spread=0.05).first, seconds_per_epoch=4.0)
    found = RunGroup((of_steps,)).epoch_seconds
    assert found is not None
    assert (found.median, found.q1, found.q3) == pytest.approx((4.0, 3.0, 5.0))
    assert RunGroup((replace(of_steps, epoch_seconds=measured),)).epoch_seconds == measured


def test_metrics_are_means_and_deviations_over_seeds() -> None:
    ends = [(Epoch(1, 5, s, values={"accuracy": a}),) for s, a in ((1.0, 0.5), (3.0, 0.7))]
    group = RunGroup(tuple(run(seed=i, metrics=m) for i, m in enumerate(ends)))
    (point,) = group.curve("accuracy")
    assert (point.epoch, point.seconds) == (1, 2.0)
    assert point.spread.mean == pytest.approx(0.6)
    assert point.spread.deviation == pytest.approx(0.02**0.5)
    assert group.ends("accuracy") == point.spread and group.ends("loss") is None
    assert RunGroup(group.runs[:1]).ends("accuracy") == Spread(0.5, 0.0, 1)


def test_noise_is_overlap_of_quartiles_or_of_seeds() -> None:
    assert timed(0.20, spread=0.02).within_noise_of(timed(0.23, spread=0.02))
    assert not timed(0.20, spread=0.01).within_noise_of(timed(0.23, spread=0.01))
    assert timed(0.20, 0.24).within_noise_of(timed(0.22, 0.23))
    assert not timed(0.20, 0.21).within_noise_of(timed(0.22, 0.23))


def study(*runs: RunResult, **more: object) -> StudyResults:
    plain = StudyResults("t", "", "", StudyMachine(), runs)
    return replace(plain, **more)  # type: ignore[arg-type]


def test_seeds_are_grouped_and_like_is_compared_with_like() -> None:
    others = ({"emulated": True}, {"predicted": True}, {"workload": "x"}, {"batch": 7})
    runs = [run(seed=1), run(seed=0), run("auto", 4), *(run(**other) for other in others)]
    first, *rest = comparisons(study(*runs))
    assert [[r.seed for r in group.runs] for group in first.groups] == [[0, 1], [0]]
    assert first.devices == (2, 4)
    assert [group.first.strategy for group in first.groups] == ["data", "auto"]
    assert [len(c.groups) for c in rest] == [1] * len(others)


def test_weak_scaling_compares_batches_of_the_same_rows_per_device() -> None:
    runs = run("single", 1, batch=16), run("data", 2, batch=32), run("data", 4, batch=64)
    assert len(comparisons(study(*runs))) == 3
    assert len(comparisons(study(*runs, settings=StudySettings(scaling="weak")))) == 1


def test_one_device_is_single_where_it_ran() -> None:
    times = Quartiles(1.0, 1.0, 1.0)
    data, single = (run(s, 1, step_seconds=times) for s in ("data", "single"))
    for runs, expected in (((data, single), "single"), ((data,), "data")):
        (found,) = comparisons(study(*runs, run("auto", 2)))
        assert found.one_device is not None and found.one_device.first.strategy == expected
    (found,) = comparisons(study(data, run("auto", 2), run("ddp", 2)))
    assert found.most_devices(lambda g: g) == 2 and found.most_devices(lambda g: None) is None
