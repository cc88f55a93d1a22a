"""Several documents on one page: alike ones are compared, others kept apart."""

from dataclasses import replace

import pytest

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.groups import comparisons
from synchromesh.results.merged import merged
from synchromesh.results.run import Quartiles
from synchromesh.results.study import StudyMachine, StudySettings
from tests.report import sample

TWO = sample.minimal()
ONE = replace(
    TWO, command="other", price=HourlyPrice(3600.0), created="2026-11-23",
    runs=(replace(TWO.runs[0], strategy="single", devices=1, seconds=2.0,
                  step_seconds=Quartiles(0.0426, 0.04, 0.05)),),
)  # fmt: skip


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
