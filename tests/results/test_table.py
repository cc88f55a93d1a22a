"""The CSV: a row for each run that reads back as it was, and runs nothing in a spreadsheet."""

import csv
import io

import pytest

from synchromesh.results.table import harmless, table
from tests.report import sample


def test_a_row_for_each_run_with_its_figures() -> None:
    study = sample.full()
    rows = list(csv.DictReader(io.StringIO(table(study))))
    assert len(rows) == len(study.runs)
    for row, run in zip(rows, study.runs, strict=True):
        assert (row["strategy"], int(row["devices"]), int(row["seed"])) == (
            run.strategy, run.devices, run.seed,
        )  # fmt: skip
        if run.status == "failed":
            assert row["reason"] == run.reason and row["step_seconds_median"] == ""
            continue
        assert run.step_seconds and float(row["step_seconds_median"]) == run.step_seconds.median
        assert int(row["peak_memory_bytes"]) == max(m.total for m in run.peak_memory_bytes)
        assert float(row["final_accuracy"]) == run.metrics[-1].values["accuracy"]
        assert row["emulated"] == "yes"


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", " =1"])
def test_what_a_spreadsheet_would_run_is_text(text: str) -> None:
    assert harmless(text) == f"'{text}"


def test_numbers_and_other_texts_stay() -> None:
    assert [harmless(cell) for cell in (-1.5, 3, None, "a=b", "", True)] == [
        -1.5, 3, None, "a=b", "", "yes",
    ]  # fmt: skip
