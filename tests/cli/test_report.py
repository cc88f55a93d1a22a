"""The command `report`: a study, run folders, and what is neither."""

import gzip
import json
from pathlib import Path

import pytest

from synchromesh.cli import main
from tests.report import sample
from tests.runs.test_result import LOG

TRACE = {
    "traceEvents": [
        {"ph": "X", "pid": 0, "tid": 0, "name": "step 1", "cat": "step", "ts": 0, "dur": 1e4},
        {"ph": "X", "pid": 0, "tid": 0, "name": "step 2", "cat": "step", "ts": 1e4, "dur": 1e4},
        {"ph": "X", "pid": 0, "tid": 1, "name": "mm", "cat": "computation", "ts": 9e3, "dur": 4e3},
    ]
}


def study(folder: Path) -> Path:
    folder.mkdir()
    (folder / "results.json").write_text(sample.minimal().to_json())
    return folder


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in LOG))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("synchromesh") and said.count("\n") == 1 and "Traceback" not in said
    return said


def test_a_study_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "page.html"
    assert main(["report", str(study(tmp_path / "study")), "-o", str(output)]) == 0
    assert "page.html: 2 runs" in capsys.readouterr().out
    assert output.read_text().startswith("<!doctype html>")
    assert "exists: --force overwrites it" in refused(
        capsys, str(tmp_path / "study"), "-o", str(output)
    )
    assert main(["report", str(tmp_path / "study"), "-o", str(output), "--force"]) == 0


def test_runs_of_train_come_together_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    with gzip.open(second / "trace.json.gz", "wt") as file:
        json.dump(TRACE, file)
    assert main(["report", str(first), str(second), str(first), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [len(run["timeline"]) for run in document["runs"]] == [0, 1]
    assert document["runs"][1]["timeline"][0] == {
        "device": 0, "start": 0.0, "end": 0.003, "kind": "computation", "name": "mm",
    }  # fmt: skip


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ("-o", str(tmp_path / "page.html"))
    assert "there is no such folder or file" in refused(capsys, str(tmp_path / "none"), *page)
    assert "holds no results.json" in refused(capsys, str(tmp_path), *page)
    assert "should end in .html" in refused(capsys, str(tmp_path), "-o", "page.pdf")
    folder = study(tmp_path / "study")
    broken = {
        "[" * 100_000: "nested deeper than 32 levels",
        '{"format": 9}': "is of format 9, this version reads 1",
        '{"title": "a"}': "created, command, machine, runs is missing",
        "not JSON": "results.json: Expecting value",
    }
    for text, sentence in broken.items():
        (folder / "results.json").write_text(text)
        assert sentence in refused(capsys, str(folder), *page)
    (folder / "study.json").write_text("{}")
    (folder / "results.json").unlink()
    for path in (folder, folder / "study.json"):
        assert (
            f"repeat the command that began it (`synchromesh compare ... -o {folder}`)"
            in refused(capsys, str(path), *page)
        )
    aliases = tmp_path / "results.yaml"
    aliases.write_text("a: &a [x, x]\nb: [*a, *a]\n")
    assert "aliases (*a) are not read" in refused(capsys, str(aliases), *page)
    assert not (tmp_path / "page.html").exists()


def test_a_broken_log_or_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ("-o", str(tmp_path / "page.html"))
    folder = run_folder(tmp_path / "a")
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"event": "st')  # killed while it wrote
    assert main(["report", str(folder), *page]) == 0
    capsys.readouterr()
    (tmp_path / "page.html").unlink()
    (folder / "trace.json.gz").write_bytes(b"no trace")
    assert "is no trace that `synchromesh train` wrote" in refused(capsys, str(folder), *page)
    (folder / "log.jsonl").write_text('{"event": "start"\n{"event": "end"}\n')
    assert "log.jsonl, line 1" in refused(capsys, str(folder), *page)
