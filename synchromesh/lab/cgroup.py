"""Control groups: each host's share of the cores and its freezer, in cgroup v1 or v2.

One group for each host, named by its tag. `VersionOne` uses the cpu controller and, where it is
mounted, the freezer; `VersionTwo` the unified tree. Without a freezer the processes are stopped.
"""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Of a quota; short against a training step, so that a quota looks like a slower core (chosen).
PERIOD_MICROSECONDS = 10_000
# Times an ordinary group's weight: a busy machine must not make the hosts slower (chosen).
CPU_WEIGHT = 10
FREEZE_SECONDS = 5.0  # for a group to freeze (chosen)
END_SECONDS = 10.0  # for killed processes to leave their group (chosen)


class Groups(ABC):
    """What the lab asks of either version; `name` is that of a host's group.

    A group is a folder in each of the trees; the freezer's tree comes last, as a process that
    enters a frozen host must be in the others by then.
    """

    def __init__(self, *trees: Path) -> None:
        self._trees = trees

    def names(self) -> Iterable[str]:
        """Names of all groups, also of those that are no lab's."""
        return sorted({path.name for t in self._trees for path in t.iterdir() if path.is_dir()})

    def doors(self, name: str) -> list[Path]:
        """Files to which a process writes its id to enter the group."""
        return [tree / name / "cgroup.procs" for tree in self._trees]

    def processes(self, name: str) -> list[int]:
        """Ids of the processes in the group; none where it is gone."""
        try:
            return [int(line) for line in self.doors(name)[0].read_text().split()]
        except OSError:  # also ENODEV: removed while it was read
            return []

    def discard(self, name: str) -> None:
        """Remove the empty group; OSError while a process is in it."""
        for tree in reversed(self._trees):
            with suppress(FileNotFoundError):
                (tree / name).rmdir()

    @abstractmethod
    def make(self, name: str) -> None:
        """Make the group, without a quota."""

    @abstractmethod
    def set_cpu(self, name: str, cpu: float) -> None:
        """Limit the group to `cpu` cores (0.4: 40 % of one)."""

    @abstractmethod
    def cpu(self, name: str) -> float:
        """Cores that the group is limited to."""

    @abstractmethod
    def freeze(self, name: str) -> None:
        """Stop every process of the group; TimeoutError where one waits in the kernel."""

    @abstractmethod
    def thaw(self, name: str) -> None:
        """Let the processes of a frozen group go on."""

    @abstractmethod
    def frozen(self, name: str) -> bool:
        """Whether the group is frozen, or about to be."""


class VersionOne(Groups):
    """cgroup v1: the cpu controller's tree and, where mounted, the freezer's."""

    def __init__(self, cpu: Path, freezer: Path | None) -> None:
        super().__init__(cpu, *([] if freezer is None else [freezer]))
        self._cpu, self._freezer = cpu, freezer

    def make(self, name: str) -> None:
        """Make the group's folder in each tree."""
        for tree in self._trees:
            (tree / name).mkdir()
        (self._cpu / name / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (self._cpu / name / "cpu.shares").write_text(str(CPU_WEIGHT * 1024))

    def set_cpu(self, name: str, cpu: float) -> None:
        """Write the quota of a period."""
        quota = round(cpu * PERIOD_MICROSECONDS)
        (self._cpu / name / "cpu.cfs_quota_us").write_text(str(quota))

    def cpu(self, name: str) -> float:
        """Quota over period."""
        quota = int((self._cpu / name / "cpu.cfs_quota_us").read_text())
        return quota / int((self._cpu / name / "cpu.cfs_period_us").read_text())

    def freeze(self, name: str) -> None:
        """By the freezer, else by SIGSTOP."""
        if self._freezer is None:
            _signal(self.processes(name), signal.SIGSTOP)
            return
        state = self._freezer / name / "freezer.state"
        state.write_text("FROZEN")
        _await(name, lambda: state.read_text().strip() == "FROZEN")

    def thaw(self, name: str) -> None:
        """By the freezer, else by SIGCONT."""
        if self._freezer is None:
            _signal(self.processes(name), signal.SIGCONT)
        else:
            (self._freezer / name / "freezer.state").write_text("THAWED")

    def frozen(self, name: str) -> bool:
        """As the freezer says, else whether all processes are stopped."""
        if self._freezer is None:
            states = [_state(pid) for pid in self.processes(name)]
            return "T" in states and set(states) <= {"T", ""}
        return (self._freezer / name / "freezer.state").read_text().strip() != "THAWED"


class VersionTwo(Groups):
    """cgroup v2: one tree for all controllers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._root = root

    def make(self, name: str) -> None:
        """Make the group's folder; ValueError where the cpu controller cannot be passed on."""
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
        (self._root / name / "cpu.weight").write_text(str(CPU_WEIGHT * 100))

    def set_cpu(self, name: str, cpu: float) -> None:
        """Write quota and period."""
        quota = round(cpu * PERIOD_MICROSECONDS)
        (self._root / name / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")

    def cpu(self, name: str) -> float:
        """Quota over period; infinite where there is no quota."""
        quota, period = (self._root / name / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)

    def freeze(self, name: str) -> None:
        """Write the group's freezer and wait until the kernel reports it."""
        (self._root / name / "cgroup.freeze").write_text("1")
        events = self._root / name / "cgroup.events"
        _await(name, lambda: "frozen 1" in events.read_text().splitlines())

    def thaw(self, name: str) -> None:
        """Write the group's freezer."""
        (self._root / name / "cgroup.freeze").write_text("0")

    def frozen(self, name: str) -> bool:
        """As the group's freezer says."""
        return (self._root / name / "cgroup.freeze").read_text().strip() == "1"


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
    deadline = time.monotonic() + END_SECONDS
    while True:
        processes = groups.processes(name)
        _signal(processes, signal.SIGKILL)
        with suppress(OSError):  # another command removes the group just now
            if groups.frozen(name):
                groups.thaw(name)
        if not processes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of {name} do not end ({END_SECONDS:g} s): {processes}")
        time.sleep(0.01)


def remove(groups: Groups, name: str) -> None:
    """Kill what is in the group, and remove it."""
    deadline = time.monotonic() + END_SECONDS
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


def _state(pid: int) -> str:
    """`T` of a stopped process, `R`, `S` ... of others; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
