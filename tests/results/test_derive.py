"""Speedup, efficiency and dollars, by sums one can do in one's head; several documents on one
page."""

from dataclasses import replace

import pytest

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.derive import derive, merged
from synchromesh.results.groups import comparisons
from synchromesh.results.run import Quartiles, Reached, RunResult
from synchromesh.results.study import StudyMachine, StudyResults, StudySettings
from tests.report import sample

TWO = sample.minimal()
ONE = replace(
    TWO, command="other", price=HourlyPrice(3600.0), created="2026-11-23",
    runs=(replace(TWO.runs[0], strategy="single", devices=1, seconds=2.0,
                  step_seconds=Quartiles(0.0426, 0.04, 0.05)),),
)  # fmt: skip


def run(strategy: str, devices: int, step: float | None, **more: object) -> RunResult:
    step_seconds = None if step is None else Quartiles(step, step, step)
    plain = RunResult("digits/cnn", strategy, devices, 64, 0, "done", step_seconds=step_seconds)
    return replace(plain, **more)  # type: ignore[arg-type]


def derived(*runs: RunResult, **more: object) -> tuple[RunResult, ...]:
    study = StudyResults("digits/cnn", "2026-11-22", "synchromesh compare", StudyMachine(), runs)
    return derive(replace(study, **more)).runs  # type: ignore[arg-type]


def speedups(*runs: RunResult, **more: object) -> list[float | None]:
    return [r.speedup for r in derived(*runs, **more)]


def test_strong_scaling_divides_step_times_of_the_same_batch() -> None:
    one, four = derived(run("single", 1, 0.6), run("auto", 4, 0.2))
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert four.speedup == 0.6 / 0.2 and four.efficiency == 0.6 / 0.2 / 4


def test_one_device_is_single_of_the_same_seed_else_the_median_of_its_seeds() -> None:
    seeds = [run("single", 1, step, seed=i) for i, step in enumerate((0.5, 0.6, 9.0))]
    other = [run("data", 1, 0.1), *seeds]
    assert speedups(*other, run("auto", 2, 0.3, seed=7))[-1] == 0.6 / 0.3
    assert speedups(*other, run("auto", 2, 0.3, seed=2))[-1] == 9.0 / 0.3, "they took turns"
    assert speedups(run("data", 1, 0.6), run("auto", 2, 0.3))[-1] == 2.0


def test_like_is_compared_with_like() -> None:
    """Another batch, another model, a failed run, hosts that were emulated, a prediction."""
    others: tuple[dict[str, object], ...] = (
        {"batch": 128}, {"workload": "digits/vit"}, {"status": "failed"}, {"emulated": True},
        {"predicted": True}, {"devices": 2}, {"cluster": "v100x8"},
    )  # fmt: skip
    for other in others:
        one = replace(run("single", 1, 0.6), **other)  # type: ignore[arg-type]
        assert speedups(one, run("data", 2, 0.3))[-1] is None, other
    assert speedups(run("single", 1, 0.6), run("data", 2, None, status="failed"))[-1] is None


def test_weak_scaling_divides_throughputs_of_the_same_rows_per_device() -> None:
    weak = StudySettings(scaling="weak")
    one, four = run("single", 1, 0.2, batch=16), run("data", 4, 0.25)
    assert speedups(one, four, settings=weak) == [1.0, (64 / 0.25) / (16 / 0.2)]
    waited = replace(four, samples_per_second=200.0)  # data was waited for
    assert speedups(one, waited, settings=weak)[1] == 200 / (16 / 0.2)
    assert speedups(one, run("data", 3, 0.25), settings=weak)[1] is None  # 64 is not 3 x 16


def test_dollars_are_those_of_the_price() -> None:
    target = Reached("accuracy=0.9", 2, 1800.0)
    cost = run("data", 2, 0.1, seconds=3600.0, to_target=target, further_targets=(target,))
    priced = derived(cost, price=HourlyPrice(12.0, devices=4))[0]
    assert priced.dollars == 12.0 and priced.to_target == replace(target, dollars=6.0)
    assert priced.further_targets[0].dollars == 6.0
    free = derived(cost)[0]
    assert free.dollars is None and free.to_target == target


def test_derived_twice_is_derived_once() -> None:
    study = StudyResults("t", "", "", StudyMachine(), (run("single", 1, 0.6), run("data", 2, 0.3)))
    assert derive(derive(study)) == derive(study) != study


def test_runs_of_one_machine_are_compared() -> None:
    both = merged([TWO, ONE])
    assert len(comparisons(both)) == 1
    assert both.runs[0].speedup == 2.0 and both.runs[2].dollars == 2.0
    assert (both.title, both.created) == ("digits/cnn", "2026-11-23")
    assert both.command == f"{TWO.command}\nother" and both.price is None
    assert merged([TWO]) is TWO


def test_runs_of_two_machines_are_not() -> None:
    both = merged([TWO, replace(ONE, machine=StudyMachine("gpu host", 64))])
    assert len(comparisons(both)) == 2 and both.runs[0].speedup is None
    assert both.runs[2].cluster == "machine 2: gpu host (64 cores)"


def test_runs_of_two_labs_are_not_and_predictions_stay_as_they_are() -> None:
    lab = replace(TWO, runs=tuple(replace(r, cluster="hosts of 9mbit") for r in TWO.runs))
    alone = replace(ONE, runs=tuple(replace(r, cluster="hosts of 5mbit") for r in ONE.runs))
    assert merged([lab, alone]).runs[0].speedup is None
    there = StudyMachine("gpu host", 64)
    v100 = replace(ONE.runs[0], cluster="v100", predicted=True)
    both = merged([lab, replace(alone, machine=there, runs=(*alone.runs, v100))])
    assert [run.cluster for run in both.runs[-2:]] == [
        "machine 2: gpu host (64 cores), hosts of 5mbit", "v100",
    ]  # fmt: skip


def test_scaling_is_not_mixed() -> None:
    with pytest.raises(ValueError, match="strong and weak scaling are not compared"):
        merged([TWO, replace(TWO, settings=StudySettings(scaling="weak"))])
