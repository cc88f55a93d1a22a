"""What ranks go on with where the plan does not fit those that are left."""

import json
from pathlib import Path

import pytest

from tests.training.test_recovery import launched

PLAN = "hybrid:tensor=2"  # fits four ranks, and not three


@pytest.mark.parametrize(
    ("known", "taken"),
    [
        (f"{PLAN},zero1,data", "zero1"),
        ("pipeline:stages=2,hybrid:tensor=2", "data"),
    ],
)
def test_the_best_that_was_predicted_and_fits_is_taken(
    known: str, taken: str, tmp_path: Path
) -> None:
    files = tmp_path / "known.json", tmp_path / "data.json"
    for file, plan, words in zip(files, (PLAN, "data"), ([f"known={known}"], []), strict=True):
        ending, _ = launched(file, plan, "1:4:step", *words)
        assert ending.code == 0, ending.failure
    found, other = (json.loads(file.read_text()) for file in files)
    (generation,) = found["generations"]
    assert (generation["plan"], generation["ranks"]) == (taken, 3)
    assert found["losses"] == pytest.approx(other["losses"], rel=1e-10)


def test_the_adapter_looks_for_plans_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    ending, _ = launched(tmp_path / "found.json", PLAN, "1:2:step", "adapt=1")
    assert ending.code == 0, ending.failure
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["generations"][0]["ranks"] == 3
    assert found["decisions"][0]["noticed"] == "the run has 3 ranks, 4 before"
