"""Control groups: version 2 on a tree of plain files, version 1 as far as it is detected."""

import os
from pathlib import Path

import pytest

from synchromesh.lab import cgroup
from synchromesh.lab.cgroup import GroupTuning, VersionOne, VersionTwo


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The root of a unified tree as the kernel shows it."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    return tmp_path


def test_version_two_gives_shares_and_freezes(tree: Path) -> None:
    groups = cgroup.detect(tree)
    assert isinstance(groups, VersionTwo)
    groups.make("a-0")
    groups.set_cpu("a-0", 0.4)
    group = tree / "a-0"
    assert (tree / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "cpu.max").read_text() == "4000 10000" and groups.cpu("a-0") == 0.4
    groups.set_cpu("a-0", 0.04)  # by a longer period
    assert (group / "cpu.max").read_text() == "1000 25000" and groups.cpu("a-0") == 0.04
    assert (group / "cpu.weight").read_text() == "1000"  # ten times the default of 100
    assert groups.doors("a-0") == [group / "cgroup.procs"]
    (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")  # the kernel's answer
    groups.freeze("a-0")
    assert (group / "cgroup.freeze").read_text() == "1" and groups.frozen("a-0")
    groups.thaw("a-0")
    assert (group / "cgroup.freeze").read_text() == "0" and not groups.frozen("a-0")
    (group / "cgroup.procs").write_text("12\n345\n")
    assert groups.processes("a-0") == [12, 345]
    assert list(groups.names()) == ["a-0"]


def test_version_two_limits_memory_and_counts_who_was_killed(tree: Path) -> None:
    groups = VersionTwo(tree)
    groups.make("a-0")
    assert groups.memory("a-0") is None and groups.killed("a-0") == 0
    (tree / "cgroup.subtree_control").write_text("cpu\n")
    (tree / "a-0" / "memory.swap.max").write_text("max\n")
    groups.set_memory("a-0", 2**30)
    assert (tree / "cgroup.subtree_control").read_text() == "+memory"
    assert (tree / "a-0" / "memory.swap.max").read_text() == "0"
    assert groups.memory("a-0") == 2**30
    (tree / "a-0" / "memory.max").write_text("max\n")
    (tree / "a-0" / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert groups.memory("a-0") is None and groups.killed("a-0") == 1
    assert groups.held("a-0") == 0
    (tree / "a-0" / "memory.stat").write_text("anon 4096\nfile 8192\n")
    assert groups.held("a-0") == 4096


def test_version_one_without_a_memory_controller_says_so(tmp_path: Path) -> None:
    groups = VersionOne(tmp_path, None)
    assert groups.memory("a-0") is None and groups.killed("a-0") == 0
    with pytest.raises(ValueError, match="a host's memory cannot be limited: mount cgroup v1's"):
        groups.set_memory("a-0", 2**30)


def test_version_two_without_a_limit(tree: Path) -> None:
    groups = VersionTwo(tree)
    groups.make("a-0")
    (tree / "a-0" / "cpu.max").write_text("max 100000\n")
    assert groups.cpu("a-0") == float("inf")


def test_version_two_passes_the_controller_on_once(tree: Path) -> None:
    (tree / "cgroup.subtree_control").write_text("cpu memory\n")
    VersionTwo(tree).make("a-0")
    assert (tree / "cgroup.subtree_control").read_text() == "cpu memory\n"


def test_a_host_that_does_not_freeze_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "TUNING", GroupTuning(freeze_seconds=0.02))
    groups = VersionTwo(tree)
    groups.make("a-0")
    (tree / "a-0" / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    with pytest.raises(TimeoutError, match=r"a-0 is not frozen after 0\.02 s"):
        groups.freeze("a-0")


def test_killing_thaws(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = VersionTwo(tree)
    groups.make("a-0")
    procs, freeze = tree / "a-0" / "cgroup.procs", tree / "a-0" / "cgroup.freeze"
    procs.write_text("12\n345\n")
    freeze.write_text("1")
    killed = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        procs.write_text("")

    monkeypatch.setattr(os, "kill", kill)
    cgroup.kill(groups, "a-0")
    assert killed == [(12, 9), (345, 9)] and freeze.read_text() == "0"


def test_an_empty_group_goes_and_a_missing_one_is_no_fault(tree: Path) -> None:
    groups = VersionTwo(tree)
    (tree / "a-0").mkdir()  # the kernel's own files go with it, so none is made here
    cgroup.remove(groups, "a-0")
    assert not (tree / "a-0").exists()
    cgroup.remove(groups, "a-0")


def test_which_version_a_machine_has(tmp_path: Path) -> None:
    assert cgroup.detect(tmp_path) is None
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    assert cgroup.detect(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.shares").write_text("1024")
    (tmp_path / "freezer").mkdir()
    (tmp_path / "cgroup.controllers").write_text("cpu\n")  # v1 beside v2: the hybrid set-up
    assert isinstance(cgroup.detect(tmp_path), VersionOne)


def test_version_one_without_a_freezer_stops_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    groups = VersionOne(tmp_path, None)
    groups.make("a-0")
    (tmp_path / "a-0" / "cgroup.procs").write_text(f"{os.getpid()}\n")
    groups.freeze("a-0")
    assert not groups.frozen("a-0")  # this process was not really stopped
    groups.thaw("a-0")
    assert [number.name for _, number in signals] == ["SIGSTOP", "SIGCONT"]  # type: ignore[attr-defined]
    assert groups.doors("a-0") == [tmp_path / "a-0" / "cgroup.procs"]
