"""Control groups: each host's share of the cores, memory and freezer, in cgroup v1 or v2.

One group for each host, named by its tag. Without a freezer (v1) processes are stopped, without
memory no limit can be set."""

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from synchromesh.values import size

ROOT = Path("/sys/fs/cgroup")
NO_MEMORY = "mount cgroup v1's memory controller beside the cpu controller"


@dataclass(frozen=True)
class GroupTuning:
    """How groups are made and how long they are waited for. Chosen, not measured."""

    # of a quota; short against a training step, so that a quota looks like a slower core
    period_microseconds: int = 10_000
    least_quota: int = 1_000  # microseconds, that the kernel takes; smaller shares: longer periods
    # times an ordinary group's weight: a busy machine must not make the hosts slower
    cpu_weight: int = 10
    freeze_seconds: float = 5.0  # for a group to freeze
    end_seconds: float = 10.0  # for killed processes to leave their group

    def quota(self, cpu: float) -> tuple[int, int]:
        """Microseconds of a share, and of the period in which it may use them."""
        period = max(self.period_microseconds, round(self.least_quota / cpu))
        return round(cpu * period), period


TUNING = GroupTuning()


class Groups(ABC):
    """What the lab asks of either version; `name` is that of a host's group.

    A group is a folder in each of the trees; the freezer's tree comes last, as a process that
    enters a frozen host must be in the others by then. HELD, KILLED: the file in the memory
    controller's tree, and the name of the number in it, of what `held` and `killed` say."""

    HELD: ClassVar[tuple[str, str]]
    KILLED: ClassVar[tuple[str, str]]

    def __init__(self, *trees: Path, memory: Path | None) -> None:
        self._trees, self._memory = trees, memory

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
    def set_memory(self, name: str, limit: int) -> None:
        """Limit the bytes that it holds, without swap. ValueError: impossible, or held."""

    @abstractmethod
    def memory(self, name: str) -> int | None:
        """Bytes that the group is limited to; None without a limit."""

    def held(self, name: str) -> int:
        """Bytes of the group's processes without files, which the kernel drops where it must."""
        return self._count(name, *self.HELD)

    def killed(self, name: str) -> int:
        """How many of the group's processes the kernel has killed, as they needed more."""
        return self._count(name, *self.KILLED)

    def _count(self, name: str, file: str, wanted: str) -> int:
        """The number of this name in a file of names and numbers; 0 where there is none."""
        path = None if self._memory is None else self._memory / name / file
        if path is None or not path.exists():
            return 0
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(number) for known, number in pairs if known == wanted), 0)

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
    """cgroup v1: the cpu controller's tree and, where mounted, memory's and the freezer's."""

    HELD = "memory.stat", "rss"
    KILLED = "memory.oom_control", "oom_kill"

    def __init__(self, cpu: Path, freezer: Path | None, memory: Path | None = None) -> None:
        trees = (tree for tree in (cpu, memory, freezer) if tree is not None)
        super().__init__(*trees, memory=memory)
        self._cpu, self._freezer = cpu, freezer

    def make(self, name: str) -> None:
        for tree in self._trees:
            (tree / name).mkdir()
        (self._cpu / name / "cpu.cfs_period_us").write_text(str(TUNING.period_microseconds))
        (self._cpu / name / "cpu.shares").write_text(str(TUNING.cpu_weight * 1024))

    def set_cpu(self, name: str, cpu: float) -> None:
        quota, period = TUNING.quota(cpu)
        (self._cpu / name / "cpu.cfs_period_us").write_text(str(period))
        (self._cpu / name / "cpu.cfs_quota_us").write_text(str(quota))

    def cpu(self, name: str) -> float:
        quota = int((self._cpu / name / "cpu.cfs_quota_us").read_text())
        return quota / int((self._cpu / name / "cpu.cfs_period_us").read_text())

    def set_memory(self, name: str, limit: int) -> None:
        """Of memory, and of memory and swap together where the kernel counts that."""
        if self._memory is None:
            raise ValueError(f"a host's memory cannot be limited: {NO_MEMORY}")
        group = self._memory / name
        swapped = group / "memory.memsw.limit_in_bytes"  # never below the other
        if swapped.exists():
            swapped.write_text("-1")
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit))
        except OSError:  # EBUSY
            held = int((group / "memory.usage_in_bytes").read_text())
            raise ValueError(
                f"{name} cannot be limited to {size.show(limit)}: its processes hold "
                f"{held / 2**20:.0f} MiB; end them first"
            ) from None
        if swapped.exists():
            swapped.write_text(str(limit))

    def memory(self, name: str) -> int | None:
        """As the kernel has rounded it to pages."""
        if self._memory is None:
            return None
        limit = int((self._memory / name / "memory.limit_in_bytes").read_text())
        return limit if limit < 2**60 else None  # v1 has no word for no limit

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


class VersionTwo(Groups):
    """cgroup v2: one tree for all controllers."""

    HELD = "memory.stat", "anon"
    KILLED = "memory.events", "oom_kill"

    def __init__(self, root: Path) -> None:
        super().__init__(root, memory=root)
        self._root = root

    def make(self, name: str) -> None:
        """Make the group's folder; ValueError where the cpu controller cannot be passed on."""
        self._pass_on("cpu")
        (self._root / name).mkdir()
        (self._root / name / "cpu.weight").write_text(str(TUNING.cpu_weight * 100))

    def _pass_on(self, controller: str) -> None:
        subtree = self._root / "cgroup.subtree_control"
        if controller not in subtree.read_text().split():
            try:
                subtree.write_text(f"+{controller}")
            except OSError as error:  # EBUSY: a container's own root has processes in it
                raise ValueError(
                    f"the {controller} controller cannot be passed on below {self._root} "
                    f"({error.strerror}): start the lab outside of this container"
                ) from None

    def set_cpu(self, name: str, cpu: float) -> None:
        quota, period = TUNING.quota(cpu)
        (self._root / name / "cpu.max").write_text(f"{quota} {period}")

    def cpu(self, name: str) -> float:
        quota, period = (self._root / name / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)

    def set_memory(self, name: str, limit: int) -> None:
        """Write both limits; processes that hold more are killed by the kernel."""
        self._pass_on("memory")
        group = self._root / name
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        (group / "memory.max").write_text(str(limit))

    def memory(self, name: str) -> int | None:
        """The limit; the file is missing where the controller was not passed on."""
        path = self._root / name / "memory.max"
        text = path.read_text().strip() if path.exists() else "max"
        return None if text == "max" else int(text)

    def freeze(self, name: str) -> None:
        (self._root / name / "cgroup.freeze").write_text("1")
        events = self._root / name / "cgroup.events"
        _await(name, lambda: "frozen 1" in events.read_text().splitlines())

    def thaw(self, name: str) -> None:
        (self._root / name / "cgroup.freeze").write_text("0")

    def frozen(self, name: str) -> bool:
        return (self._root / name / "cgroup.freeze").read_text().strip() == "1"


def detect(root: Path = ROOT) -> Groups | None:
    """The version that has this machine's cpu controller; None where neither can be written."""
    if (root / "cpu" / "cpu.shares").exists() and os.access(root / "cpu", os.W_OK):
        others = (root / "freezer", root / "memory")
        freezer, memory = (tree if os.access(tree, os.W_OK) else None for tree in others)
        return VersionOne(root / "cpu", freezer, memory)
    controllers = root / "cgroup.controllers"
    known = controllers.read_text().split() if controllers.exists() else []
    return VersionTwo(root) if "cpu" in known and os.access(root, os.W_OK) else None


def kill(groups: Groups, name: str) -> None:
    """SIGKILL to every process of the group, which is thawed, so that they can die."""
    deadline = time.monotonic() + TUNING.end_seconds
    while True:
        processes = groups.processes(name)
        _signal(processes, signal.SIGKILL)
        with suppress(OSError):  # another command removes the group just now
            if groups.frozen(name):
                groups.thaw(name)
        if not processes:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"processes of {name} do not end ({TUNING.end_seconds:g} s): {processes}"
            )
        time.sleep(0.01)


def remove(groups: Groups, name: str) -> None:
    deadline = time.monotonic() + TUNING.end_seconds
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
    deadline = time.monotonic() + TUNING.freeze_seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{name} is not frozen after {TUNING.freeze_seconds:g} s: a process waits in "
                "the kernel"
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
