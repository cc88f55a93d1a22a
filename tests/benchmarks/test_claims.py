"""The README's table: made from claims.json, each row read from what its benchmark prints."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import adapt, choice, hybrid, overhead, picture, pipeline, prediction
from benchmarks.claims import page, rows
from benchmarks.claims.claim import Claim, Form, NoFigure, Reading, Value, at_least, at_most
from benchmarks.claims.history import depends_on, files_of
from benchmarks.claims.record import Record, load, save
from benchmarks.claims.rows import CLAIMS
from benchmarks.claims.run import Run
from benchmarks.house import CHARACTERS
from benchmarks.turns import Measured

ROOT = Path(__file__).parents[2]


def test_the_readme_is_what_the_figures_say() -> None:
    text = page.PAGE.read_text()
    assert text == page.page(text, CLAIMS, load()), "make claims"


def test_the_picture_is_what_the_figures_say(tmp_path: Path) -> None:
    picture.main(tmp_path)
    for theme in picture.THEMES:
        name = f"results-{theme.name}.svg"
        drawn = (tmp_path / name).read_text()
        assert drawn == (picture.DOCS / name).read_text(), "make claims"


def test_every_record_is_of_a_row() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert set(load()) <= set(names)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_row_depends_on_what_there_is(claim: Claim) -> None:
    assert all((ROOT / room).is_dir() for room in claim.rooms)
    assert f"benchmarks/{claim.run.module}.py" in depends_on(claim)


def test_files_of_a_benchmark_are_what_it_imports() -> None:
    found = files_of("choice")
    assert {"benchmarks/pairs.py", "benchmarks/zoo.py", "benchmarks/machine.py"} <= found
    assert "benchmarks/curve.py" not in found
    assert "tests/training/test_switch_training.py" in files_of("curve")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_row_fits_the_page_when_its_goals_are_missed(claim: Claim) -> None:
    record = load().get(claim.name, Record())
    values = record.values
    missed = [replace(v, value=v.goal / 1.01 if v.least else v.goal * 1.01) for v in values]
    for found in (tuple(missed), (*values[:1], *missed[1:])):
        assert len(page._row(claim, replace(record, values=found))) <= CHARACTERS


def test_all_rows_take_45_minutes_at_most() -> None:
    assert sum(run.seconds for run in {claim.run for claim in CLAIMS}) <= 45 * 60


# How a row is written


def written(*values: Value, form: Form = rows.RATIO, **how: Any) -> str:
    claim = Claim("row", "{n} steps", Run("hybrid"), lambda _: Reading(()), form, ())
    record = Record(**{"values": values, "words": {"n": 3}, "commit": "abc", **how})
    return page.section([claim], {"row": record})


def test_what_is_behind_its_goal_is_bold() -> None:
    assert "| 3 steps | 1.020 | 1.00 | `row` |" in written(at_least(1.02, 1.0))
    assert "| **3 steps** | **1.020** | 1.00 | `row` |" in written(at_most(1.02, 1.0))
    both = written(at_least(1.02, 1.0), at_least(0.98, 1.0))
    assert "| **3 steps** | 1.020, **0.980** | 1.00 | `row` |" in both
    assert "1.00, 0.50 |" in written(at_least(1.02, 1.0), at_least(0.98, 0.5)), "goals that differ"


def test_figures_have_their_forms() -> None:
    assert "| 7.1 % | 8 % |" in written(at_most(0.0712, 0.08), form=rows.PERCENT)
    assert "| 4.3e-16 | 1e-10 |" in written(at_most(4.34e-16, 1e-10), form=rows.DEVIATION)
    assert "| 1.4e-7 | 1e-4 |" in written(at_most(1.4e-7, 1e-4), form=rows.DEVIATION)
    assert "| 19 of 20, 4 of 4 | all |" not in written(at_least(19, 20), form=rows.COUNTED)
    counted = written(at_least(19, 20), at_least(4, 4), form=rows.COUNTED)
    assert "| **19 of 20**, 4 of 4 | all |" in counted


def test_the_rounds_behind_a_figure_are_told() -> None:
    text = written(at_least(1.02, 1.0, [1.0, 1.1, 0.9]), at_least(1.0, 1.0))
    assert "behind the figures: `row` 0.90 to 1.10." in text
    assert "0 to 12 %" in written(at_most(0.05, 0.08, [0.003, 0.12]), form=rows.PERCENT)


def test_what_has_failed_or_was_not_measured_says_so() -> None:
    failed = written(failed="exit code 3: no device", words={})
    assert "| **? steps** | **failed** |  | `row` |" in failed
    assert "`row` failed: exit code 3: no device." in failed
    kept = written(at_least(1.02, 1.0), unmeasured="no folder 'ptb'", date="2026-11-20")
    assert "| 3 steps | 1.020 | 1.00 | `row` |" in kept and "commit abc, 2026-11-20" in kept
    assert "`row` was not measured with the others: no folder 'ptb'." in kept
    assert "**not measured**" in written(unmeasured="it needs root", commit="")
    assert "taken from the README of" in written(at_least(1, 1), source="the README of")
    assert "cores busy just before: `row` 1.3." in written(at_least(1, 1), busy=1.3)


def test_a_page_without_the_section_is_refused() -> None:
    with pytest.raises(ValueError, match="no section"):
        page.page("# Title\n", [], {})


def test_records_survive_the_file(tmp_path: Path) -> None:
    values = (at_least(1.02, 1.0, [0.9, 1.1]), at_most(3, 4))
    record = Record(values, {"n": 3}, [[1.0, 2.0]], command="python", commit="abc", busy=0.5)
    save({"row": record, "none": Record(failed="so")}, tmp_path / "claims.json")
    assert load(tmp_path / "claims.json") == {"row": record, "none": Record(failed="so")}


def test_emulated_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synchromesh.lab.reason_unavailable", lambda: "they need root")
    assert Run("hybrid", hosts=True).hindrance() == "they need root"
    monkeypatch.setattr("synchromesh.lab.reason_unavailable", lambda: None)
    monkeypatch.setattr("synchromesh.lab.labs", lambda: (["mine"], []))
    assert "other emulated hosts are up (mine)" in Run("hybrid", hosts=True).hindrance()
    monkeypatch.setattr("synchromesh.lab.labs", lambda: ([], []))
    assert not Run("hybrid", hosts=True).hindrance()


# What rows read, from what the benchmarks say of made-up measurements


def told(document: Mapping[str, Any]) -> Any:
    """As it is after printing."""
    return json.loads(json.dumps(document))


def test_throughput_of_what_overhead_says() -> None:
    seconds = {"baseline": [[1.0, 1.0], [1.2, 1.0]], "synchromesh": [[1.0, 1.0], [1.0, 1.0]]}
    summary = overhead.summary("cifar100/vit_tiny", 8, 2, {"seconds": seconds, "losses": {}})
    found = rows.throughput(told({"rows": [summary]}))
    assert found.values == (Value(1.05, 0.97, True, (1.0, 1.1)),)


def test_a_mixed_plan_of_what_hybrid_says() -> None:
    seconds = {"ddp": [[1.0]] * 2, "synchromesh": [[0.5], [0.6]], "by-hand": [[0.45]] * 2}
    report = hybrid.report({"seconds": seconds, "losses": dict.fromkeys(seconds, 1.0)})
    found = rows.mixed(told(report))
    assert found.values == (Value(0.55, 0.5, False, (0.5, 0.6)),)
    assert found.words == {"by_hand": 0.45}


def measured(*seconds: float, plan: str = "", losses: tuple[float, ...] = (2.0,)) -> Measured:
    return Measured(list(seconds), [[1.0]] * len(seconds), list(losses), plan=plan)


def narrow(**how: Any) -> Any:
    auto = measured(1.0, 1.0, plan="data; @stages=0:a/1:b/2-3:c; @micro_batches=4", **how)
    sides = {"auto": auto, "single": measured(2.0, 2.2), "ddp": measured(4.0, 6.0)}
    part = pipeline.summary(pipeline.PARTS["narrow"][1], sides)
    return told({"parts": {"narrow": part}, "shape": {"blocks": 24}})


def test_stages_of_what_pipeline_says() -> None:
    found = rows.narrow(narrow())
    single, ddp = found.values
    assert single == Value(2.1, 1.5, True, (2.0, 2.2)) and ddp.value == 5.0
    assert found.words == {"stages": 3, "blocks": 24}
    with pytest.raises(NoFigure, match="apart"):
        rows.narrow(narrow(losses=(2.1,)))


def pairs() -> list[dict[str, Any]]:
    """Two models in a lab: plans as measured, the chosen one second best once."""
    found: list[dict[str, Any]] = []
    for model, seconds in {"conv": (1.0, 1.1), "vit": (2.0, 1.6)}.items():
        for plan, taken in zip(("data", "tensor"), seconds, strict=True):
            found.append(
                {
                    "model": model, "lab": "4x200", "plan": plan, "chosen": plan == "data",
                    "predicted": 1.1 * taken, "measured": taken,
                    "predicted_bytes": 98, "measured_bytes": 100,
                }
            )  # fmt: skip
        found.append({"model": model, "lab": "4x200", "rival": "ddp", "measured": 3.0})
    return found


def test_choices_and_predictions_of_what_choice_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pairs.json").write_text(json.dumps(pairs()))
    words = ["choice", "--from", str(tmp_path / "pairs.json"), "--json"]
    monkeypatch.setattr("sys.argv", words)
    choice.main()
    document = json.loads(capsys.readouterr().out)
    found = rows.chosen(document)
    mean, most = found.values
    assert mean.value == pytest.approx(1.125) and mean.spread == (1.0, 1.25)
    assert not mean.reached and not most.reached and most.value == 1.25
    assert found.words == {"cases": 2}
    assert found.points == {"conv 4x200": [3.0, 1.0], "vit 4x200": [1.5, 0.8]}
    (time,), (bytes_,) = rows.predicted(document).values, rows.memory(document).values
    assert time.value == pytest.approx(0.1) and time.goal == prediction.GOALS["time"]
    assert bytes_.value == pytest.approx(0.02)
    assert rows.predicted(document).points[0] == [1100.0, 1000.0]
    assert rows.staged(told(prediction.document(pairs()))).values == (time, bytes_)


def test_auto_among_given_plans(capsys: pytest.CaptureFixture[str]) -> None:
    found = [{**r, "plan": "auto", "stands_for": "data"} for r in pairs() if r.get("chosen")]
    told = prediction.document([*pairs(), *found])
    assert told["behind"] == pytest.approx({"conv": 1.0, "vit": 1.25})
    assert told["goals"]["time"] < prediction.GOALS["time"]
    prediction.show(told["rows"], told)
    assert "auto over the quickest vit: 1.250 (goal 1.02)" in capsys.readouterr().out
    assert not prediction.document(pairs())["behind"]


def adaptive(switch: int | None) -> Any:
    """The report of a run of 100 steps that switched at this step."""
    event = {
        "step": switch, "switched": True, "measuring_seconds": 2.0, "pause_seconds": 0.5,
        "most_bytes": 1e6, "to": "single",
    }  # fmt: skip
    steps = [{"kind": "step", "step": i, "seconds": 1.0, "plan": "data"} for i in range(100)]
    ends = {"kind": "end", "events": [event] if switch else [], "watching": 0.1}
    lines = [{"kind": "plan", "plan": "data", "measuring": 9.0}, *steps, ends]
    found = adapt.report(adapt.CASES["links"], lines, {})
    goals = {"within": adapt.WITHIN, "measuring": adapt.MEASURING}
    return told({"cases": {"links": found}, "goals": goals})


def test_a_switch_of_what_adapt_says() -> None:
    late = adaptive(adapt.CHANGE + 30)
    assert rows.noticed(late).values == (Value(30, 20, False),)
    assert not rows.noticed(late).values[0].reached
    assert rows.measuring(late).values == (Value(0.02, 0.03, False),)
    for read in (rows.noticed, rows.measuring):
        with pytest.raises(NoFigure, match="no plan was switched"):
            read(adaptive(None))


def test_what_was_not_trained_to_its_end_is_no_figure() -> None:
    goals = [{"what": w, "met": True, "figures": "", "value": 1.5, "limit": 1e-4} for w in "hel"]
    found = rows.large(told({"steps": 20, "goals": goals}))
    assert found.words == {"held": 1.5, "steps": 20} and found.values[0].goal == 1e-4
    goals[1] |= {"met": False, "what": "auto trains 20 steps", "figures": "3 of 20 losses"}
    with pytest.raises(NoFigure, match="auto trains 20 steps: 3 of 20 losses"):
        rows.large(told({"steps": 20, "goals": goals}))
    killed = {"passed": False, "code": 0}
    with pytest.raises(NoFigure, match="did not go on"):
        rows.switched({"deviations": {"a": 0.0, "resumed": 0.0}, "goal": 1, "killed": killed})


def test_counts_and_extremes() -> None:
    assert rows.passed([{"passed": True}, {"passed": False}]).values == (Value(1, 2, True),)
    line = {"planted": 8, "found": 7, "plans": 4}
    assert rows.power({"rows": [line, line], "alarms": 1}).values == (
        Value(14, 16, True),
        Value(7, 8, True),
    )
    search = [
        {"case": "400 components, free", "seconds": 2.0, "goal": 10.0},
        {"case": "400 components, 0.7", "seconds": 3.0, "goal": 10.0},
        {"case": "100 components", "seconds": 9.0, "goal": 1.0},
    ]
    assert rows.search({"rows": search}).values == (Value(3.0, 10.0, False, (2.0, 3.0)),)
    with pytest.raises(NoFigure, match="not a number"):
        at_most(float("nan"), 1.0)
