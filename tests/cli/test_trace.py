"""`synchromesh trace`: the trace of a run, copied, and what is said where there is none."""

import gzip
import json
from pathlib import Path

import pytest

from synchromesh.cli import main
from synchromesh.recording.chrome import chrome_trace, write_chrome_trace
from tests.recording.drawn import drawn


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
