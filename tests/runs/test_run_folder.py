"""Tests of a run's folder: its name, its log, which checkpoint is resumed."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from synchromesh.checkpoint.manifest import NAME, Manifest
from synchromesh.runs.events import RunStopped, StepLoss
from synchromesh.runs.run_folder import Resumed, RunFolder, default


def run(path: Path, *checkpoints: str) -> RunFolder:
    folder = RunFolder(path)
    folder.make()
    for age, name in enumerate(checkpoints):
        (folder.checkpoints / name).mkdir()
        Manifest({}, 1000.0 + age).write(folder.checkpoints / name)
        os.utime(folder.checkpoints / name, (1000 - age, 1000 - age))  # as of a copy
    return folder


def test_a_name_cannot_leave_the_runs_folder() -> None:
    for name in ("digits/cnn", "../../etc/x", "/etc/passwd", "..", "a\x1b[2J\nb", ""):
        path = default(name)
        assert path.parts[0] == "runs" and len(path.parts) == 2 and path.name.isprintable()
        assert not path.name.startswith(".")


def test_log_is_one_object_a_line(tmp_path: Path) -> None:
    folder = run(tmp_path / "r")
    folder.log(StepLoss(step=1, epoch=1, loss=0.5))
    folder.log(RunStopped(step=1, signal="SIGTERM"))
    lines = [json.loads(x) for x in (folder.path / "log.jsonl").read_text().splitlines()]
    assert [x["event"] for x in lines] == ["step", "stop"] and lines[0]["loss"] == 0.5


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Inside, no file can have more than so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_lines_and_files(tmp_path: Path) -> None:
    folder = run(tmp_path / "r")
    folder.write({"plan": "data"}, "default: data")
    folder.log(StepLoss(step=1, epoch=1, loss=None))
    with room_for((folder.path / "log.jsonl").stat().st_size + 10):
        with pytest.raises(OSError):
            folder.log(StepLoss(step=2, epoch=1, loss=None))
        with pytest.raises(OSError, match=r"run\.json"):
            folder.write({"plan": "data" * 100}, "default: data")
    folder.log(StepLoss(step=3, epoch=1, loss=None))
    lines = [json.loads(x) for x in (folder.path / "log.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [1, 3]
    assert json.loads((folder.path / "run.json").read_text()) == {"plan": "data"}
    names = {path.name for path in folder.path.iterdir()}
    assert names == {"run.json", "plan.yaml", "log.jsonl", "checkpoints"}


def test_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cannot be written to .*: name another with --output DIR"
    ):
        RunFolder(tmp_path / "file" / "r").make()


def test_newest_checkpoint_is_resumed_best_never_before_others(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", "step-20", "epoch-1", "step-40", "best", "step-50.tmp", "other")
    resumed = Resumed.of(str(folder.path))
    assert resumed.checkpoint.name == "step-40"
    assert [p.name for p in folder.saved()] == ["step-40", "epoch-1", "step-20", "best"]
    (folder.checkpoints / "step-40" / NAME).unlink()  # it was never finished
    assert [p.name for p in folder.saved()] == ["epoch-1", "step-20", "best"]


def test_a_checkpoint_knows_its_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", "step-20", "epoch-1")
    folder.write({"workload": "w", "seed": 3, "batch_size": 8, "ranks": 2}, "default: data\n")
    resumed = Resumed.of(str(folder.checkpoints / "epoch-1"))
    assert resumed.folder == folder and resumed.checkpoint.name == "epoch-1"
    asked = {"workload": "w", "seed": 3, "batch_size": 8, "plan": "auto", "ranks": 2}
    unsaid = {"adapt": False, "bf16": False, "lr_rule": "none", "warm_up": 0.0}
    texts = {"batches": "", "allow": ""}
    assert folder.asked() == {**asked, **unsaid, **texts}, "of a run that did not say it yet"


def test_a_damaged_run_json_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "r")
    for text, message in {
        "{": "run.json", '{"seed": 1}': "workload, batch_size is missing",
        '{"workload": "w", "seed": "x", "batch_size": 1}': "seed: should be a whole number, not",
        '{"workload": "w", "seed": 1, "batch_size": 0}': "batch_size: should be from 1",
    }.items():  # fmt: skip
        (folder.path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            folder.asked()


def test_a_checkpoint_that_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "copied").mkdir()
    with pytest.raises(ValueError, match="copied: no checkpoint lies in it"):
        Resumed.of(str(tmp_path / "copied"))
    (tmp_path / "copied" / NAME).write_text("{}")
    assert Resumed.of(str(tmp_path / "copied")) == Resumed(tmp_path / "copied", None)


def test_run_without_checkpoints(tmp_path: Path) -> None:
    folder = run(tmp_path / "r")
    with pytest.raises(ValueError, match="the run has no checkpoint yet"):
        Resumed.of(str(folder.path))
