"""Emulated hosts: namespaces on one machine with a stated link rate and share of a core each.

    with Hosts(4, mbit=200, cpu=0.4) as hosts:
        results = hosts.run([sys.executable, "-m", "benchmarks.hybrid", "--rank"], timeout=120)

    host 0: eth0 10.77.0.1 ---tbf==tbf--- port0 |
    host 1: eth0 10.77.0.2 ---tbf==tbf--- port1 |  a bridge in a namespace of its own
    ...                                         |

Every interface lives in a namespace that belongs to one `Hosts`, so the machine's own network is
not touched and deleting the namespaces deletes everything. A janitor process holds the reading end
of a pipe: when the owner closes it, or dies in whichever way, the janitor kills what runs in the
hosts and removes them. Names carry the owner's process id and start time; should the janitor have
been killed as well, the next `Hosts` removes what a dead owner left.

Needs Linux, root, `ip`, `tc`, `taskset` and the cpu controller of cgroup v1.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CGROUPS = Path("/sys/fs/cgroup/cpu")
PERIOD = (
    10_000  # microseconds; short against a training step, so that a quota looks like a slower core
)
SHARES = (
    10_240  # ten times an ordinary process's weight: a busy machine must not make the hosts slower
)
TAG = re.compile(r"smhosts-(\d+)-(\d+)")

# A burst passes unshaped, so it must be small against the messages that are timed (0.25 MB and
# more), and it must hold one 64 KB segment of the sender's offload, or tbf cuts every segment into
# packets in software.
BURST = 64 * 1024 + 1024
# What waits in a full queue, in seconds of the link: three senders that meet at one receiver must
# not lose packets at once.
QUEUE_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    """What one host's process said and how it ended."""

    rank: int
    code: int
    output: str
    error: str


class HostFailed(RuntimeError):
    """A command failed or ran out of time; the message ends with that host's last words."""


def reason_unavailable() -> str | None:
    """Why hosts cannot be emulated here, in one sentence; None where they can."""
    if not sys.platform.startswith("linux"):
        return f"emulated hosts need Linux network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulated hosts need root (user id {os.geteuid()}): run the command with sudo"
    missing = [program for program in ("ip", "tc", "taskset") if shutil.which(program) is None]
    if missing:
        return f"emulated hosts need {', '.join(missing)}: install iproute2 and util-linux"
    if not (CGROUPS / "cpu.cfs_quota_us").exists() or not os.access(CGROUPS, os.W_OK):
        return f"emulated hosts need the cpu controller of cgroup v1, writable at {CGROUPS}"
    return None


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise HostFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of `pid`: both together name a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def _tags() -> set[str]:
    """Tags of all owners, alive or dead, that have hosts on this machine."""
    names = [path.name for path in CGROUPS.glob("smhosts-*")] + _call(
        "ip", "netns", "list"
    ).split()
    return {found[0] for name in names if (found := TAG.match(name))}


def _kill(group: Path) -> None:
    """End every process in the control group and remove it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
            if not pids:
                group.rmdir()
                return
        except FileNotFoundError:
            return
        except OSError:  # busy: the last process has not been reaped yet
            pids = []
        for pid in pids:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def remove(tag: str) -> None:
    """Remove every host of an owner with all that runs there."""
    for group in sorted(CGROUPS.glob(f"{tag}-*")):
        _kill(group)
    for line in _call("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{tag}-"):
            _call("ip", "netns", "delete", name)


def remove_stale() -> list[str]:
    """Remove the hosts of owners that are no longer alive; returns their tags."""
    stale = []
    for tag in sorted(_tags()):
        found = TAG.match(tag)
        assert found is not None
        if _start_time(int(found[1])) != found[2]:
            remove(tag)
            stale.append(tag)
    return stale


class Hosts:
    """`count` emulated hosts with `mbit` Mbit/s in each direction and `cpu` of a core each."""

    def __init__(self, count: int, mbit: float = 200.0, cpu: float = 0.4) -> None:
        if (reason := reason_unavailable()) is not None:
            raise ValueError(reason)
        if not 1 <= count <= 200:
            raise ValueError(f"the number of emulated hosts must be 1 to 200, not {count}")
        if mbit <= 0 or not 0.1 <= cpu <= (os.cpu_count() or 1):
            raise ValueError(
                f"a host needs a positive link rate (mbit={mbit}) and between 0.1 of a core "
                f"and all {os.cpu_count()} of them (cpu={cpu})"
            )
        self.count, self.mbit, self.cpu = count, mbit, cpu
        self._tag = f"smhosts-{os.getpid()}-{_start_time(os.getpid())}"
        self._port = 29_400
        self._janitor: subprocess.Popen[bytes] | None = None

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"

    def __enter__(self) -> "Hosts":
        if self._tag in _tags():
            raise ValueError("this process already has emulated hosts: close them first")
        remove_stale()
        self._janitor = subprocess.Popen(
            [sys.executable, "-S", __file__, "--janitor", self._tag],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is not for the janitor
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hosts with all that runs in them; a second call does nothing."""
        if self._janitor is not None:
            assert self._janitor.stdin is not None
            self._janitor.stdin.close()
            self._janitor.wait(timeout=60)
            self._janitor = None

    def _name(self, part: int | str) -> str:
        return f"{self._tag}-{part}"

    def _build(self) -> None:
        switch = self._name("switch")
        _call("ip", "netns", "add", switch)
        _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank in range(self.count):
            host, port = self._name(rank), f"port{rank}"
            _call("ip", "netns", "add", host)
            _call(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", host),
            )
            _call("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _call("ip", "-n", host, "address", "add", f"{self.address(rank)}/24", "dev", "eth0")
            _call("ip", "-n", host, "link", "set", "eth0", "up")
            _call("ip", "-n", host, "link", "set", "lo", "up")
            (CGROUPS / host).mkdir()
            (CGROUPS / host / "cpu.cfs_period_us").write_text(str(PERIOD))
            (CGROUPS / host / "cpu.shares").write_text(str(SHARES))
        self.set_rate(self.mbit)
        self.set_cpu(self.cpu)

    def set_rate(self, mbit: float, ranks: Sequence[int] | None = None) -> None:
        """Shape both ends of the links of `ranks` (default: all) to `mbit`, also during a run."""
        limit = BURST + int(mbit * 1e6 / 8 * QUEUE_SECONDS)
        for rank in range(self.count) if ranks is None else ranks:
            ends = ((self._name(rank), "eth0"), (self._name("switch"), f"port{rank}"))
            for namespace, device in ends:
                _call(
                    *("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf"),
                    *("rate", f"{int(mbit * 1e6)}bit", "burst", f"{BURST}b", "limit", str(limit)),
                )

    def set_cpu(self, cpu: float, ranks: Sequence[int] | None = None) -> None:
        """Give `ranks` (default: all) the share `cpu` of a core each, also during a run."""
        for rank in range(self.count) if ranks is None else ranks:
            quota = CGROUPS / self._name(rank) / "cpu.cfs_quota_us"
            quota.write_text(str(int(cpu * PERIOD)))

    def run(
        self,
        command: Sequence[str],
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> list[Result]:
        """Start `command` once on every host and wait; the results by rank.

        The process on host r has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
        GLOO_SOCKET_IFNAME set and one thread per operator. Raises `HostFailed` for the host that
        failed first, or when the command runs longer than `timeout` seconds; nothing of it is left
        running.
        """
        assert self._janitor is not None, "enter the context first: with Hosts(...) as hosts"
        self._port += 1  # a store of an earlier run may not have let go of its port yet
        with tempfile.TemporaryDirectory(prefix="smhosts-") as folder:
            processes = [
                self._start(rank, command, Path(folder), environment or {}, cwd)
                for rank in range(self.count)
            ]
            try:
                first = self._wait(processes, time.monotonic() + timeout)
            finally:
                for process in processes:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
            results = [
                Result(
                    rank,
                    process.returncode,
                    Path(folder, f"{rank}.out").read_text(errors="replace"),
                    Path(folder, f"{rank}.err").read_text(errors="replace"),
                )
                for rank, process in enumerate(processes)
            ]
        if first is None:
            return results
        words = results[first].error[-3000:] or results[first].output[-3000:]
        fate = f"ended with code {results[first].code}"
        if results[first].code == -9:
            fate = f"was killed, or did not finish in {timeout:g} s"
        raise HostFailed(f"host {first} of {self.count} {fate}:\n{words}")

    def _start(
        self,
        rank: int,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        cwd: str | Path | None,
    ) -> "subprocess.Popen[bytes]":
        host = self._name(rank)
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(self._port),
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        # The shell joins the control group before it becomes the command: nothing runs outside.
        # A host is one core: on several, the first thread to run takes the whole period's quota to
        # its core, and the thread that moves messages, on another, stands still until the next.
        core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
        enter = (
            f"echo $$ > {CGROUPS / host}/cgroup.procs && "
            f'exec taskset -c {core} ip netns exec {host} "$@"'
        )
        with open(folder / f"{rank}.out", "wb") as out, open(folder / f"{rank}.err", "wb") as err:
            return subprocess.Popen(
                ["sh", "-c", enter, "sh", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=variables,
                cwd=cwd,
            )

    def _wait(self, processes: "list[subprocess.Popen[bytes]]", deadline: float) -> int | None:
        """Wait for all; the rank that failed first or was late, None when all ended well."""
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return failed[0]
            if all(code == 0 for code in codes):
                return None
            time.sleep(0.02)
        return next(rank for rank, process in enumerate(processes) if process.poll() is None)


def _janitor(tag: str) -> None:
    sys.stdin.buffer.read()  # ends when the owner closes its end or is no more
    remove(tag)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--janitor":
        raise SystemExit("hosts.py is the janitor's program here: use the class Hosts")
    _janitor(sys.argv[2])
