"""A command that runs once on every host of a lab: its output, its first failure, its end.

A thread of its own reads what the hosts write and watches them, so that the owner may change the
lab meanwhile. The first host that fails ends the run: the others get SIGTERM and, three seconds
later, SIGKILL, each with all of its process group."""

import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from synchromesh.lab import entry
from synchromesh.lab.cgroup import Groups
from synchromesh.launcher.rank import reported_shortage
from synchromesh.values import size


@dataclass(frozen=True)
class RunLimits:
    """Of time and size of a run. All chosen, not measured."""

    end_seconds: float = 3.0  # for hosts that outlive a failed one or the time limit
    grace_seconds: float = 30.0  # to checkpoint, after a signal that was passed on
    poll_seconds: float = 0.02  # between two reads of what the hosts wrote
    wake_seconds: float = 0.2  # between the main thread's returns to the interpreter
    longest_line: int = 64 * 1024  # bytes; a longer one is passed on in parts
    drain_seconds: float = 1.0  # for what is still in the pipes
    shown_characters: int = 3000  # of a failed host's output in the message


class Stream(IntEnum):
    OUTPUT = 1
    ERROR = 2


LIMITS = RunLimits()
# Called with the host, a `Stream`, and a line with its end; in the thread of the run.
Listener = Callable[[int, int, bytes], None]


@dataclass(frozen=True)
class Way:
    """How a process of a run gets onto its host. place: namespace, cores, and the doors of its
    control groups (lab/entry.py); variables: of its environment."""

    place: tuple[str, ...]
    variables: dict[str, str]

    def start(
        self, command: Sequence[str], parent: int, environment: Mapping[str, str],
        cwd: str | Path | None,
    ) -> "subprocess.Popen[bytes]":  # fmt: skip
        """Starts a command there. parent: the process whose death is its own; 0: none."""
        namespace, cores, *doors = self.place
        enter = [sys.executable, "-S", "-I", entry.__file__, namespace, cores, str(parent)]
        return subprocess.Popen(
            [*enter, *doors, "--", *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, **self.variables, **environment}, cwd=cwd,
            start_new_session=True,  # its group is ended as one
        )  # fmt: skip

    def take(self) -> None:
        """Takes this process, of one thread, there. OSError where the kernel refuses."""
        namespace, cores, *doors = self.place
        os.environ.update(self.variables)
        entry.enter(namespace, {int(core) for core in cores.split(",")}, 0, doors)


@dataclass(frozen=True)
class Result:
    """What one host's process wrote and how it ended (code -9: killed by signal 9)."""

    rank: int
    code: int
    output: str
    error: str


class HostFailed(RuntimeError):
    """A command failed or ran out of time on a host; the message closes with its last output."""

    def __init__(
        self, results: Sequence[Result], rank: int, timeout: float | None, why: str = "",
        host: int | None = None,
    ) -> None:  # fmt: skip
        """why: what else is known of it, in words. host: that of the rank; default: the same."""
        result = results[rank]
        fate = f"ended with code {result.code}"
        if timeout is not None:
            fate = f"did not finish in {timeout:g} s"
        elif result.code < 0:
            fate = f"was ended by {signal.Signals(-result.code).name}"
        output = (result.error or result.output)[-LIMITS.shown_characters :]
        super().__init__(
            f"host {rank if host is None else host} of {len(results)} {fate}"
            + (f": {why}" if why else "")
            + (f":\n{output}" if output else "")
        )
        self.results, self.rank, self.late = tuple(results), rank, timeout is not None

    @property
    def code(self) -> int:
        """Exit code as a shell has it: 124 for a time limit, 128 + N for signal N."""
        code = self.results[self.rank].code
        return 124 if self.late else 128 - code if code < 0 else code


class Running:
    """Processes by host and what they write: `listener` gets every line, else the results do.
    `thaw` is called before processes are killed, `why` for words on a failure. hosts: on which
    they are."""

    def __init__(
        self, processes: "Sequence[subprocess.Popen[bytes]]", timeout: float | None,
        thaw: Callable[[], None], listener: Listener | None, why: Callable[[], str],
        hosts: Sequence[int],
    ) -> None:  # fmt: skip
        self._why, self._hosts = why, hosts
        self._processes, self._timeout, self._thaw = processes, timeout, thaw
        self._listener = listener
        self._late_at = None if timeout is None else time.monotonic() + timeout
        self._kill_at: float | None = None  # when SIGTERM has had its time; set by the thread
        self._asked: float | None = None  # when the owner wants the end; set by the owner
        self._first: int | None = None  # the rank that failed first or was late
        self._late = False
        self._error: BaseException | None = None
        self._kept = {(r, s): bytearray() for r in range(len(processes)) for s in Stream}
        self._part = {key: b"" for key in self._kept}  # a line without its end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="lab-run", daemon=True)
        self._thread.start()

    def poll(self) -> list[Result] | None:
        """None while the command runs, then the results by rank. Raises `HostFailed`."""
        if not self._done.is_set():
            return None
        self._thread.join()
        if self._error is not None:
            raise self._error
        results = [
            Result(rank, process.returncode, *(self._text(rank, stream) for stream in Stream))
            for rank, process in enumerate(self._processes)
        ]
        if self._first is not None and self._asked is None:
            late = self._timeout if self._late else None
            raise HostFailed(results, self._first, late, self._why(), self._hosts[self._first])
        return results

    def wait(self, timeout: float | None = None) -> list[Result]:
        """The results by rank. `HostFailed`; TimeoutError after `timeout` s: it still runs."""
        limit = math.inf if timeout is None else time.monotonic() + timeout
        # Python's signal handlers run in the main thread, which is not woken by a signal that the
        # kernel gave to another thread: hence it returns to the interpreter at intervals.
        while not self._done.wait(max(0.0, min(LIMITS.wake_seconds, limit - time.monotonic()))):
            if time.monotonic() >= limit:
                raise TimeoutError(f"the command still runs after {timeout:g} s")
        results = self.poll()
        assert results is not None
        return results

    def pass_on(self, number: int) -> None:
        """Send a signal to the command on every host; what outlives it by 30 s is killed."""
        grace = 0.0 if number == signal.SIGKILL else LIMITS.grace_seconds
        self._asked = time.monotonic() + grace
        for process in self._processes:
            _signal_group(process, number)

    def end(self) -> None:
        """Kill the command on every host, and wait for its end. Results then are no failures."""
        self._asked = time.monotonic()
        self._done.wait()

    def _supervise(self) -> None:
        try:
            self._hear()
        except BaseException as error:  # of the listener: a reader that has gone away
            self._error = error
        finally:
            self._check_failures()
            self._kill()
            for process in self._processes:
                process.wait()
                for pipe in (process.stdout, process.stderr):
                    assert pipe is not None
                    pipe.close()
            self._done.set()

    def _hear(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                pipes = (Stream.OUTPUT, process.stdout), (Stream.ERROR, process.stderr)
                for stream, pipe in pipes:
                    assert pipe is not None
                    selector.register(pipe, selectors.EVENT_READ, (rank, stream))
            while not all([self._ended(process) for process in self._processes]):
                self._read(selector, LIMITS.poll_seconds)
                self._check_failures()
            limit = time.monotonic() + LIMITS.drain_seconds
            while selector.get_map() and time.monotonic() < limit:
                self._read(selector, LIMITS.poll_seconds)
        for rank, stream in self._kept:
            self._pass_on_lines(rank, stream, b"", last=True)

    def _ended(self, process: "subprocess.Popen[bytes]") -> bool:
        """Whether it has ended; the rest of its group is killed while the number is its own."""
        if process.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, process.pid, options) is None:
                return False
            _signal_group(process, signal.SIGKILL)
            process.wait()
        return True

    def _check_failures(self) -> None:
        now = time.monotonic()
        if self._first is None and self._asked is None:  # a second signal would cut grace short
            self._first = self._failed(now)
            if self._first is not None:
                self._kill_at = now + LIMITS.end_seconds
                for process in self._processes:
                    _signal_group(process, signal.SIGTERM)
        if any(at is not None and now >= at for at in (self._kill_at, self._asked)):
            self._kill()

    def _failed(self, now: float) -> int | None:
        codes = [process.returncode for process in self._processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        self._late = failed is None and self._late_at is not None and now > self._late_at
        return codes.index(None) if self._late and None in codes else failed

    def _kill(self) -> None:
        left = [process for process in self._processes if process.returncode is None]
        for process in left:
            _signal_group(process, signal.SIGKILL)
        if left:
            self._thaw()

    def _read(self, selector: selectors.BaseSelector, seconds: float) -> None:
        if not selector.get_map():
            time.sleep(seconds)  # the pipes are closed, the processes run on
        for key, _ in selector.select(seconds):
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fileobj)
            rank, stream = key.data
            self._pass_on_lines(rank, stream, data, last=not data)

    def _pass_on_lines(self, rank: int, stream: Stream, data: bytes, last: bool) -> None:
        if self._listener is None:
            self._kept[rank, stream] += data
            return
        *lines, rest = (self._part[rank, stream] + data).split(b"\n")
        for line in lines:
            self._listener(self._hosts[rank], stream, line + b"\n")
        if rest and (last or len(rest) > LIMITS.longest_line):
            self._listener(self._hosts[rank], stream, rest + b"\n")
            rest = b""
        self._part[rank, stream] = rest

    def _text(self, rank: int, stream: Stream) -> str:
        return self._kept[rank, stream].decode(errors="replace")


class Killings:
    """Processes of a run that the kernel ended for their memory, of hosts whose groups are
    `parts`. What runs may say before, in the file `said`, why it will be killed."""

    def __init__(self, groups: Groups, parts: Sequence[str], said: Path) -> None:
        self._groups, self._parts, self._said = groups, tuple(parts), said
        self._before = [groups.killed(part) for part in parts]
        said.unlink(missing_ok=True)  # of an earlier run

    def told(self) -> str:
        """Of which hosts the kernel killed processes, and what these had said; or empty."""
        groups, parts = self._groups, self._parts
        hosts = [h for h, part in enumerate(parts) if groups.killed(part) > self._before[h]]
        limits = sorted({groups.memory(parts[h]) or 0 for h in hosts})
        if not hosts:
            return ""
        killed = (
            f"the kernel killed processes of host{'s' * (len(hosts) > 1)} "
            f"{', '.join(map(str, hosts))}, which needed more than their "
            f"{' or '.join(map(size.show, limits))} of memory"
        )
        said = reported_shortage(self._said)
        return f"{killed}; {said}" if said else killed


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
