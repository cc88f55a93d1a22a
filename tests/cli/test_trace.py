"""`synchromesh trace`: the trace of a run, copied, and what is said where there is none."""

import gzip
import json
from pathlib import Path

import pytest

from synchromesh.cli import main
from synchromesh.runs.timeline import chrome_trace, write_chrome_trace
from tests.runs.drawn import drawn


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ranks = [drawn(r, compute="##..##", all_reduce="..aa..") for r in (0, 1)]
    document = chrome_trace(ranks, steps=[20, 20], plan="data")
    write_chrome_trace(tmp_path / "trace.json.gz", document)
    return tmp_path


def test_the_trace_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run)]) == 0
    assert f"{run / 'trace.json.gz'}: step 20 under plan data" in capsys.readouterr().out
    assert main(["trace", str(run), "-o", str(run / "copy.json"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["trace"] == str(run / "copy.json") and shown["steps"] == [20, 20]
    copied = json.loads((run / "copy.json").read_text())
    assert len(copied["traceEvents"]) == shown["events"]
    assert main(["trace", str(run), "-o", str(run / "copy.gz")]) == 0
    assert json.loads(gzip.decompress((run / "copy.gz").read_bytes())) == copied


def test_no_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["trace", str(run), "-o", str(run / "no/copy.json")]) == 2
    assert "cannot be written (No such file or directory)" in capsys.readouterr().err
    (run / "trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert main(["trace", str(run)]) == 2
    assert "is no trace of a run ('otherData')" in capsys.readouterr().err
    (run / "trace.json.gz").unlink()
    assert main(["trace", str(run)]) == 2
    assert "recorded no step; train with --trace-steps A-B" in capsys.readouterr().err


def test_runs_of_a_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "study"
    runs = [study / "runs" / name for name in ("data", "ddp")]
    for path in runs:
        path.mkdir(parents=True)
    (study / "study.json").write_text("{}")
    assert main(["trace", str(study)]) == 2
    assert "none of its runs has recorded steps yet" in capsys.readouterr().err
    document = chrome_trace([drawn(0, compute="##..##")])
    write_chrome_trace(runs[0] / "trace.json.gz", document)
    assert main(["trace", str(runs[0])]) == 0
    assert "data/trace.json.gz: 1 recorded step of a study's run" in capsys.readouterr().out
    assert main(["trace", str(study)]) == 2
    assert f"a study's folder; name one of its runs: {runs[0]}\n" in capsys.readouterr().err
    assert main(["trace", str(runs[1])]) == 2
    assert "this run of a study failed" in capsys.readouterr().err
