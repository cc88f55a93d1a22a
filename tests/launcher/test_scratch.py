"""Tests of scratch folders: gone with their launcher, even where it was killed."""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import pytest

from synchromesh.launcher.scratch import scratch


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def die_inside() -> None:
    with scratch() as folder:
        (folder / "log").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_launchers_folder_is_removed_by_the_next(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=die_inside)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with scratch() as folder:
        assert [*tmp_path.iterdir()] == [folder] and folder != left
        (folder / "log").write_text("x")
    assert not [*tmp_path.iterdir()]


def test_folders_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "synchromesh-mine"  # by name only: nobody says it is a launcher's
    foreign.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_text("")
    link = tmp_path / "synchromesh-link"
    link.symlink_to(elsewhere)
    with scratch() as first, scratch() as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert {*tmp_path.iterdir()} == {foreign, elsewhere, link} and (elsewhere / "owner").exists()
