"""Control groups: each host's share of the cores and its freezer, in cgroup v1 or v2.

One group for each host, named by its tag. `VersionOne` uses the cpu controller and, where it is
mounted, the freezer; `VersionTwo` the unified tree. Without a freezer the processes are stopped.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

ROOT = Path("/sys/fs/cgroup")
# Microseconds; short against a training step, so that a quota looks like a slower core.
PERIOD = 10_000
# Ten times an ordinary group's weight: a busy machine must not make the hosts slower.
WEIGHT = 10
FREEZE_SECONDS = 5.0


class Groups(Protocol):
    """What the lab asks of either version; `name` is that of a host's group."""

    def names(self) -> Iterable[str]: ...
    def make(self, name: str) -> None: ...
    def set_cpu(self, name: str, cpu: float) -> None: ...
    def cpu(self, name: str) -> float: ...
    def freeze(self, name: str) -> None: ...
    def thaw(self, name: str) -> None: ...
    def frozen(self, name: str) -> bool: ...
    def doors(self, name: str) -> list[Path]:
        """Files to which a process writes its id to enter the group."""

    def processes(self, name: str) -> list[int]: ...
    def discard(self, name: str) -> None:
        """Remove the empty group; OSError while a process is in it."""


class VersionOne:
    """cgroup v1: the cpu controller's tree and, where mounted, the freezer's."""

    def __init__(self, cpu: Path, freezer: Path | None) -> None:
        self._cpu, self._freezer = cpu, freezer

    def names(self) -> Iterable[str]:
        trees = [self._cpu] if self._freezer is None else [self._cpu, self._freezer]
        return sorted({path.name for tree in trees for path in tree.iterdir() if path.is_dir()})

    def make(self, name: str) -> None:
        (self._cpu / name).mkdir()
        (self._cpu / name / "cpu.cfs_period_us").write_text(str(PERIOD))
        (self._cpu / name / "cpu.shares").write_text(str(WEIGHT * 1024))
        if self._freezer is not None:
            (self._freezer / name).mkdir()

    def set_cpu(self, name: str, cpu: float) -> None:
        (self._cpu / name / "cpu.cfs_quota_us").write_text(str(round(cpu * PERIOD)))

    def cpu(self, name: str) -> float:
        quota = int((self._cpu / name / "cpu.cfs_quota_us").read_text())
        return quota / int((self._cpu / name / "cpu.cfs_period_us").read_text())

    def freeze(self, name: str) -> None:
        if self._freezer is None:
            _signal(self.processes(name), signal.SIGSTOP)
            return
        state = self._freezer / name / "freezer.state"
        state.write_text("FROZEN")
        _await(name, lambda: state.read_text().strip() == "FROZEN")

    def thaw(self, name: str) -> None:
        if self._freezer is None:
            _signal(self.processes(name), signal.SIGCONT)
        else:
            (self._freezer / name / "freezer.state").write_text("THAWED")

    def frozen(self, name: str) -> bool:
        if self._freezer is None:
            states = [_state(pid) for pid in self.processes(name)]
            return "T" in states and set(states) <= {"T", ""}
        return (self._freezer / name / "freezer.state").read_text().strip() != "THAWED"

    def doors(self, name: str) -> list[Path]:
        # The freezer comes last: a process that enters a frozen host must be in the others.
        trees = [self._cpu] if self._freezer is None else [self._cpu, self._freezer]
        return [tree / name / "cgroup.procs" for tree in trees]

    def processes(self, name: str) -> list[int]:
        return _read_ids(self._cpu / name / "cgroup.procs")

    def discard(self, name: str) -> None:
        for tree in (self._freezer, self._cpu):
            if tree is not None:
                with suppress(FileNotFoundError):
                    (tree / name).rmdir()


class VersionTwo:
    """cgroup v2: one tree for all controllers."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> Iterable[str]:
        return sorted(path.name for path in self._root.iterdir() if path.is_dir())

    def make(self, name: str) -> None:
        subtree = self._root / "cgroup.subtree_control"
        if "cpu" not in subtree.read_text().split():
            try:
                subtree.write_text("+cpu")
            except OSError as error:  # EBUSY: a container's own root has processes in it
                raise ValueError(
                    f"the cpu controller cannot be passed on below {self._root} "
                    f"({error.strerror}): start the lab outside of this container"
                ) from None
        (self._root / name).mkdir()
        (self._root / name / "cpu.weight").write_text(str(WEIGHT * 100))

    def set_cpu(self, name: str, cpu: float) -> None:
        (self._root / name / "cpu.max").write_text(f"{round(cpu * PERIOD)} {PERIOD}")

    def cpu(self, name: str) -> float:
        quota, period = (self._root / name / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)

    def freeze(self, name: str) -> None:
        (self._root / name / "cgroup.freeze").write_text("1")
        events = self._root / name / "cgroup.events"
        _await(name, lambda: "frozen 1" in events.read_text().splitlines())

    def thaw(self, name: str) -> None:
        (self._root / name / "cgroup.freeze").write_text("0")

    def frozen(self, name: str) -> bool:
        return (self._root / name / "cgroup.freeze").read_text().strip() == "1"

    def doors(self, name: str) -> list[Path]:
        return [self._root / name / "cgroup.procs"]

    def processes(self, name: str) -> list[int]:
        return _read_ids(self._root / name / "cgroup.procs")

    def discard(self, name: str) -> None:
        with suppress(FileNotFoundError):
            (self._root / name).rmdir()


def detect(root: Path = ROOT) -> Groups | None:
    """The version that has this machine's cpu controller; None where neither can be written."""
    if (root / "cpu" / "cpu.shares").exists() and os.access(root / "cpu", os.W_OK):
        freezer = root / "freezer"
        return VersionOne(root / "cpu", freezer if os.access(freezer, os.W_OK) else None)
    controllers = root / "cgroup.controllers"
    if (
        controllers.exists()
        and "cpu" in controllers.read_text().split()
        and os.access(root, os.W_OK)
    ):
        return VersionTwo(root)
    return None


def kill(groups: Groups, name: str) -> None:
    """SIGKILL to every process of the group, which is thawed, so that they can die."""
    deadline = time.monotonic() + 10
    while True:
        processes = groups.processes(name)
        _signal(processes, signal.SIGKILL)
        with suppress(OSError):  # another command removes the group just now
            if groups.frozen(name):
                groups.thaw(name)
        if not processes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of {name} do not end (10 s): {processes}")
        time.sleep(0.01)


def remove(groups: Groups, name: str) -> None:
    """Kill what is in the group, and remove it."""
    deadline = time.monotonic() + 10
    while True:
        kill(groups, name)
        try:
            groups.discard(name)
            return
        except OSError:  # busy: the last process has not been reaped, or a new one came in
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _await(name: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FREEZE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{name} is not frozen after {FREEZE_SECONDS:g} s: a process waits in the kernel"
            )
        time.sleep(0.005)


def _signal(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _read_ids(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except OSError:  # also ENODEV: removed while it was read
        return []


def _state(pid: int) -> str:
    """`T` of a stopped process, `R`, `S` ... of others; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
