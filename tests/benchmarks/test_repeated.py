"""What is said of plans that repeated starts chose."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import choice, repeated


def rows() -> list[dict[str, Any]]:
    """Three of four starts of one model take `data`, one `single`; another always takes `data`."""
    chosen = [("bert", k, "data", 0.2) for k in ("empty", "kept", "empty")]
    chosen += [("bert", "kept", "single", 0.3)]
    chosen += [("mlp", k, "data", 0.1) for k in ("empty", "kept")]
    starts = [{"model": m, "from": k, "plan": p, "predicted": s} for m, k, p, s in chosen]
    taken = [("bert", "data", 0.22), ("bert", "single", 0.33), ("mlp", "data", 0.1)]
    turns = [{"model": m, "plan": p, "measured": s} for m, p, s in taken]
    return [{**row, "lab": "4x200"} for row in [*starts, *turns]]


def test_another_choice_counts_by_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(rows()))
    words = ["choice", "--starts", "--from", str(tmp_path / "rows.json"), "--json"]
    monkeypatch.setattr("sys.argv", words)
    assert choice.main() == 1
    told = json.loads(capsys.readouterr().out)
    found = told["found"]["bert 4x200"]
    assert found["apart"] == pytest.approx(1.5) and told["found"]["mlp 4x200"]["apart"] == 1.0
    assert list(found["plans"]) == ["data", "single"], "the quickest first"
    assert (found["plans"]["data"]["empty"], found["plans"]["data"]["kept"]) == (2, 1)
    assert found["plans"]["single"]["predicted"] == [0.3]
    assert told["missed"] == ["bert 4x200: plans that were chosen are 1.500 apart (goal 1.05)"]


def test_the_same_choice_reaches_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    found = repeated.table([row for row in rows() if row["model"] == "mlp"])
    assert not repeated.faults(found)
    repeated.show(found)
    assert "apart: 1.000" in capsys.readouterr().out
