"""Several documents on one page: alike ones are compared, others kept apart."""

from dataclasses import replace

import pytest

from synchromesh.results.groups import comparisons
from synchromesh.results.merged import merged
from synchromesh.results.run import Quartiles
from synchromesh.results.study import Machine, Price, Settings
from tests.report import sample

TWO = sample.minimal()
ONE = replace(
    TWO, command="other", price=Price(3600.0), created="2026-11-23",
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
    both = merged([TWO, replace(ONE, machine=Machine("gpu host", 64))])
    assert len(comparisons(both)) == 2 and both.runs[0].speedup is None
    assert both.runs[2].cluster == "machine 2: gpu host (64 cores)"


def test_scaling_is_not_mixed() -> None:
    with pytest.raises(ValueError, match="strong and weak scaling are not compared"):
        merged([TWO, replace(TWO, settings=Settings(scaling="weak"))])
