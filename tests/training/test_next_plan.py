"""What ranks go on with where the plan does not fit those that are left."""

import json
from pathlib import Path

import pytest

from benchmarks.local_kills import apart
from tests.training import test_recovery
from tests.training.test_recovery import NEAR, launched

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


@pytest.mark.wide(1)
@pytest.mark.parametrize(
    ("plan", "words", "ranks", "why"),
    [
        ("auto", "1:6:step", 3, "prepared for these ranks"),
        ("auto", "1:6:step 2:6:step", 2, "that of before"),  # of two losses nothing is prepared
        ("auto", "switch@3=sharded-data 1:6:step", 3, "that of before"),
        (PLAN, "1:6:step", 3, f"{PLAN} does not fit"),
    ],
)
def test_ranks_go_on_with_what_was_prepared_for_them(
    plan: str, words: str, ranks: int, why: str, tmp_path: Path
) -> None:
    ending, _ = launched(tmp_path / "found.json", plan, *words.split())
    assert ending.code == 0, ending.failure
    found = json.loads((tmp_path / "found.json").read_text())
    (generation,) = found["generations"]
    assert (generation["ranks"], generation["why"]) == (ranks, why)
    ending, _ = launched(tmp_path / "usual.json", "data", ranks=2)
    usual = json.loads((tmp_path / "usual.json").read_text())
    assert apart(found, usual) < NEAR


def test_ranks_that_are_as_many_as_before_go_back_to_their_plan(tmp_path: Path) -> None:
    file, words = tmp_path / "found.json", ["1:3:step", "*:8:wait4", "adapt=99"]
    ending, _ = launched(file, PLAN, *words, restarts=1)
    assert ending.code == 0, ending.failure
    lost, come = json.loads(file.read_text())["generations"]
    assert (lost["ranks"], lost["why"]) == (3, "prepared for these ranks")
    assert (come["ranks"], come["plan"], come["why"]) == (4, PLAN, "that of 4 ranks before")


def test_the_adapter_looks_for_plans_of_the_ranks_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was measured on others before, which is sampled, and not measured anew."""
    monkeypatch.setattr(test_recovery, "EPOCHS", 6)
    file, words = tmp_path / "found.json", ["1:2:step", "*:4:wait4", "adapt=1"]
    ending, _ = launched(file, PLAN, *words, restarts=1)
    assert ending.code == 0, ending.failure
    found = json.loads(file.read_text())
    assert [g["ranks"] for g in found["generations"]] == [3, 4]
    assert found["decisions"][0]["noticed"] == "the run has 4 ranks, 3 before"
    places = found["places"]
    assert places["all measured"] == 1
    assert places["devices sampled"] > 0 and places["links sampled"] > 0
