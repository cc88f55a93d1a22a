"""The numbers under the pictures, against the runs that they are of."""

from collections.abc import Callable
from statistics import median

import pytest

from synchromesh.report import (
    curves,
    memory,
    predictions,
    scaling,
    staleness,
    steps,
    strips,
    times,
)
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.numbers import NONE, plain, seconds, share, size
from synchromesh.report.page import SECTIONS
from synchromesh.report.palette import marks
from synchromesh.report.summary import summary
from synchromesh.results.groups import comparisons
from synchromesh.results.run import RunResult
from synchromesh.results.study import StudyResults
from tests.report import sample

STUDY = sample.full()
(COMPARISON,) = comparisons(STUDY)
SUBJECT = Subject(COMPARISON, marks(run.strategy for run in STUDY.runs), "name")
EMPTY = Subject(comparisons(sample.minimal())[0], marks(["data", "auto"]), "name")
AUTO = [run for run in STUDY.runs if run.strategy == "auto" and run.devices == 8]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are looked at in `test_chromium.py`."""
    monkeypatch.setattr("synchromesh.report.figure.drawn", lambda name, paint: (name,))


def row(figure: PageFigure, *heads: str) -> dict[str, str]:
    """The row of a figure's table that begins so, by columns."""
    (cells,) = [r for r in figure.table.rows if r[: len(heads)] == heads]
    return dict(zip(figure.table.columns, cells, strict=True))


def of_auto(value: Callable[[RunResult], float]) -> float:
    return median(map(value, AUTO))


def step(run: RunResult) -> float:
    assert run.step_seconds is not None
    return run.step_seconds.median


def test_every_table_has_as_many_cells_as_columns() -> None:
    for _, _, figures, _ in SECTIONS:
        for figure in figures(SUBJECT):
            assert figure.alternative and figure.table.rows
            assert {len(r) for r in figure.table.rows} == {len(figure.table.columns)}


def test_ages_stand_beside_what_all_send_wait_for_and_reach() -> None:
    study = sample.asynchronous()
    subject = Subject(comparisons(study)[0], marks(r.strategy for r in study.runs), "name")
    (figure,) = staleness.figures(subject)
    assert {len(r) for r in figure.table.rows} == {len(figure.table.columns)}
    assert [r[0] for r in figure.table.rows] == ["data", "downpour", "ssp", "int8"]
    assert row(figure, "ssp", "4") == {
        "strategy": "ssp", "devices": "4", "mean age": "1.50", "most": "2",
        "most steps ahead": "1", "sent in a step, most": size(798), "samples/s": plain(3202),
        "waiting, exposed": "23.0 %", "accuracy at the end": "0.9200", "to target": seconds(5.0),
    }  # fmt: skip
    assert row(figure, "data", "4")["mean age"] == row(figure, "int8", "4")["most"] == NONE
    assert "downpour: 2.00, ssp: 1.50" in figure.alternative
    assert StudyResults.from_dict(study.to_dict(), "study") == study
    assert not [*staleness.figures(SUBJECT)], "nobody was stale"


def test_where_nothing_was_measured_there_is_no_figure() -> None:
    assert [name for name, _, figures, _ in SECTIONS if list(figures(EMPTY))] == ["time"]


def test_times_speedups_and_shares_are_those_of_the_runs() -> None:
    (figure,) = times.training_time(SUBJECT)
    assert row(figure, "auto", "8")["median"] == seconds(of_auto(step) * sample.STEPS)
    (figure,) = scaling.speedup(SUBJECT)
    alone = {run.seed: step(run) for run in STUDY.runs if run.strategy == "single"}
    one = median(alone.values())
    ratio = median(alone[run.seed] / step(run) for run in AUTO)  # a seed's runs take turns
    assert row(figure, "auto", "8")["speedup"] == plain(ratio)
    assert row(figure, "auto", "8")["efficiency"] == share(ratio / 8)
    (figure,) = times.communication(SUBJECT)
    cells = row(figure, "auto", "8")
    assert cells["share of communication, exposed"] == "25.0 %"
    assert cells["waiting"] == seconds(0.25 * 0.25 * of_auto(step))
    assert cells["of it with hidden communication"] == seconds(0.13 * of_auto(step))
    (figure,) = scaling.scaling(SUBJECT)
    cells = row(figure, "auto", "8")
    assert cells["T₁/N"] == seconds(one / 8)
    assert cells["T_comm"] == seconds(of_auto(step) - one / 8)


def test_memory_and_predictions_are_those_of_the_runs() -> None:
    (figure,) = memory.figures(SUBJECT)
    peak = AUTO[0].peak_memory_bytes[0]
    cells = row(figure, "auto", "8", "0")
    assert (cells["activations"], cells["all"]) == (size(peak.activations), size(peak.total))
    (figure,) = predictions.figures(SUBJECT)
    predicted = of_auto(lambda run: run.predicted_step_seconds or 0)
    assert row(figure, "auto", "8")["predicted / measured"] == plain(predicted / of_auto(step))


def test_metrics_are_means_over_seeds() -> None:
    accuracy, top5 = curves.figures(SUBJECT)
    assert (accuracy.title, top5.title) == ("Accuracy on 8 devices", "Top5_accuracy on 8 devices")
    ends = [run.metrics[-1].values["accuracy"] for run in AUTO]
    cells = row(accuracy, "auto", "8")
    assert cells["accuracy"].startswith(f"{sum(ends) / 3:.4f} ± ") and cells["seeds"] == "3"


def test_strips_show_each_plan_and_when_it_was_switched() -> None:
    titles = [strip.title for strip in strips.strips(SUBJECT)]
    assert titles == [
        "single on 1 device", "auto on 2 devices", "auto on 4 devices", "data on 8 devices",
        "tensor on 8 devices", "pipeline on 8 devices", "hybrid on 8 devices",
        "auto on 8 devices, until step 390", "auto on 8 devices, from step 391",
    ]  # fmt: skip
    (figure,) = strips.figures(SUBJECT)
    cells = row(figure, "encoder.layer.11")
    assert cells["auto on 8 devices, until step 390"] == "data"
    assert cells["auto on 8 devices, from step 391"] == "hybrid:tensor=2, stage 1"
    assert "paused for 410 ms, 29.6 MiB moved" in figure.note
    assert "messages between host 3 and host 4" in figure.note


def test_the_quickest_timelines_are_shown() -> None:
    (figure,) = steps.figures(SUBJECT)
    assert list(dict.fromkeys(r[0] for r in figure.table.rows))[:2] == ["auto", "pipeline"]
    assert "The 3 slower are left out." in figure.note
    spans = [s for run in AUTO[:1] for s in run.timeline if s.device == 0 and s.kind == "waiting"]
    assert row(figure, "auto", "0")["waiting"] == seconds(sum(s.end - s.start for s in spans))


def test_the_summary_has_all_groups_and_what_failed() -> None:
    found = summary(COMPARISON)
    names = [name for _, columns in found.groups for name in columns]
    assert len(found.rows) == len(COMPARISON.groups) and found.columns == len(names)
    cells = dict(zip(names, next(r for r in found.rows if r[:2] == ("auto", "8")), strict=True))
    assert cells["target"] == "accuracy=0.6 (not reached by 1 of 3)"
    assert cells["peak memory"] == size(AUTO[0].peak_memory_bytes[0].total)
    (failed,) = found.remarks
    assert (failed.strategy, failed.devices, failed.seed, failed.failed) == ("tensor", 8, 2, True)
    slim = [name for _, columns in summary(EMPTY.comparison).groups for name in columns]
    assert "speedup" not in slim and "strategy" in slim


def notes(case: str) -> dict[str, str]:
    study = sample.difficult(case)
    subject = Subject(comparisons(study)[0], marks(run.strategy for run in study.runs), "")
    return {figure.name: figure.note for _, _, make, _ in SECTIONS for figure in make(subject)}


def test_notes_say_nothing_of_what_is_not_there() -> None:
    """Whiskers and hidden communication: `test_axes.py`, by what is drawn."""
    slower, quicker = notes("slower"), notes("minutes")
    assert "Where it is negative" in quicker["-scaling"]
    assert "Where it is negative" not in slower["-scaling"]
    assert "seeds" not in slower["-metric-0"] and "seeds" in next(curves.figures(SUBJECT)).note
    (some,) = memory.figures(SUBJECT)
    assert "A line marks" in some.note and "A line marks" not in slower["-memory"]
