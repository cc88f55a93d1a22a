"""The launcher of an elastic run: the ranks of a host, of which some may be lost.

It starts and watches its ranks, and serves the store by which those of a generation find each
other. A rank that a signal ends, or that is silent, is lost: all others hear of it at once, leave
what they wait for (engine/connections.py), and meet again in the next generation. A rank that
fails with an error of its own ends the run, for the others would fail alike."""

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, Signals
from signal import signal as handle
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from synchromesh.launcher.forks import Fork
from synchromesh.launcher.generation import SOCKET, Generation, Loss, Wire
from synchromesh.launcher.launcher import (
    RANK,
    TUNING,
    Ending,
    environment,
    failure_of,
    stop_of_a_rank,
)  # fmt: skip
from synchromesh.launcher.scratch import scratch
from synchromesh.values.fields import to_plain

Process = Fork | subprocess.Popen[bytes]
STOPS = (SIGTERM, SIGINT, SIGHUP, SIGQUIT)
LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class ElasticTuning:
    """Seconds; chosen. A pause of 3 is no fault."""

    silent: float = 4.0  # without a word of life
    away: float = 1.0  # between two looks of the launcher: then it was away itself
    meet: float = 300.0  # for all to come to a generation, once the first has; as of a collective


LIMITS = ElasticTuning()


@dataclass
class _Slot:
    """The place of one process, which may be a rank of every generation."""

    process: Process
    rank: int
    line: Wire | None = None
    ready: int = -1  # left all generations up to this one
    heard: float = 0.0
    code: int | None = None
    survived: bool = False  # lost, and the others go on

    @property
    def unheard(self) -> float:
        """Seconds without a word."""
        return time.monotonic() - self.heard


@dataclass
class Supervisor:
    """The ranks of this host. least: of ranks with which the run goes on."""

    slots: list[_Slot]
    listener: socket.socket
    least: int
    grace: float
    say: Callable[[str], None]
    number: int = 0  # of the generation
    store: TCPStore | None = None
    stop: Signals | None = None
    refused: bool = False  # whether it ends without the ranks that are lost
    killed: bool = False  # whether ranks are being ended
    codes: dict[int, int] = field(default_factory=dict)  # of those that had ended then
    deadline: float = float("inf")
    looked: float = 0.0  # when it did last
    met: float = field(default_factory=time.monotonic)  # when nobody waited for others
    links: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def _places(self) -> range:
        return range(len(self.slots))

    @property
    def _gone(self) -> list[_Slot]:
        """Those that have ended in this generation."""
        return [slot for slot in self.slots if slot.code is not None and not slot.survived]

    @property
    def live(self) -> list[_Slot]:
        return [slot for slot in self.slots if slot.code is None]

    def run(self) -> dict[int, int]:
        """Until all ranks have ended; exit codes of those whose end matters, by rank."""
        self.links.register(self.listener, selectors.EVENT_READ, None)
        while self.live:
            for key, _ in self.links.select(TUNING.poll):
                if key.fileobj is self.listener:
                    self._greet()
                else:
                    self._hear(key.data)
            self._watch()
            self._go_on()
            if time.monotonic() > self.deadline:
                self.kill()
        return self.codes or self._ended()

    def _ended(self) -> dict[int, int]:
        return {slot.rank: slot.code for slot in self._gone if slot.code is not None}

    def _greet(self) -> None:
        link, _ = self.listener.accept()
        self.links.register(link, selectors.EVENT_READ, Wire(link))

    def _hear(self, line: Wire) -> None:
        try:
            for message in line.received():
                match message:
                    case {"slot": int(number), "ready": int(ready)} if number in self._places:
                        self.slots[number].line, self.slots[number].ready = line, ready
                    case {"refused": str(why)} if not self.refused:
                        self.refused = True
                        self.say(f"the run ends: {why}")
                for slot in self.slots:
                    if slot.line is line:
                        slot.heard = time.monotonic()
        except EOFError:
            self.links.unregister(line.link)
            line.close()

    def _watch(self) -> None:
        """Ranks that have ended since, or are silent and end now."""
        before, self.looked = self.looked, time.monotonic()
        if self.looked - before > LIMITS.away:
            for slot in self.live:
                slot.heard = self.looked
        lost: dict[int, str] = {}
        late = self._late()
        for slot in self.live:
            silent = slot.line is not None and slot.unheard > LIMITS.silent
            if (silent or late is slot) and not self.killed:
                _kill(slot.process)
                slot.process.wait()
                lost[slot.rank] = (
                    f"has been silent for {LIMITS.silent:.0f} s" if silent else
                    f"did not come to where the others meet within {LIMITS.meet:.0f} s"
                )  # fmt: skip
            slot.code = slot.process.poll()
            if slot.code is None or self.killed:
                continue
            _kill(slot.process)  # what it has started
            if slot.code < 0:
                lost.setdefault(slot.rank, f"was killed by {Signals(-slot.code).name}")
            elif slot.code > 0:
                self.end(TUNING.end)
        if lost and not self.killed:
            self._lose(lost)

    def _late(self) -> _Slot | None:
        """One for whom others have waited too long."""
        away = [slot for slot in self.live if slot.ready < self.number]
        if not away or len(away) == len(self.live):
            self.met = self.looked
        return away[0] if self.looked - self.met > LIMITS.meet else None

    def _lose(self, lost: Mapping[int, str]) -> None:
        """lost: what became of which ranks."""
        if len(self.live) < self.least:
            return self.end(TUNING.end)
        gone = [s for s in self._gone if s.rank in lost]
        losses = [Loss(s.rank, lost[s.rank], round(s.unheard, 3)) for s in gone]
        self.say("; ".join(map(str, losses)))
        for slot in self.live:
            if slot.line is not None:
                slot.line.send({"lost": to_plain(losses)})

    def _go_on(self) -> None:
        """The next generation, once all that live have left the one before."""
        live = sorted(self.live, key=lambda slot: slot.rank)
        if self.killed or not live or any(slot.ready < self.number for slot in live):
            return
        before = tuple(slot.rank for slot in live)
        with socket.create_server((LOCAL, 0)) as server:
            port = server.getsockname()[1]
            self.store = TCPStore(
                LOCAL, port, is_master=True, wait_for_workers=False,
                master_listen_fd=server.detach(),
            )  # fmt: skip
        self.number += 1
        for slot in self._gone:
            slot.survived = True
        for rank, slot in enumerate(live):
            slot.rank = rank
            if slot.line is not None:
                own = Generation(self.number, rank, before, LOCAL, port)
                slot.line.send({"generation": to_plain(own)})

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """A signal goes to all ranks; a second one kills them."""
        if self.stop is not None:
            return self.kill()
        self.stop, self.deadline = Signals(number), time.monotonic() + self.grace
        for slot in self.live:  # which stop together, and meet before where some are lost
            with suppress(ProcessLookupError):
                os.killpg(slot.process.pid, number)

    def end(self, seconds: float) -> None:
        """Ranks may end within so many seconds."""
        if self.killed:
            return
        self.killed, self.deadline = True, time.monotonic() + seconds
        self.codes = self._ended()
        for slot in self.live:
            with suppress(ProcessLookupError):
                os.killpg(slot.process.pid, SIGTERM)

    def kill(self) -> None:
        self.killed = True
        for slot in self.live:
            _kill(slot.process)
            slot.process.wait()


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)


def launch(
    command: Sequence[str], ranks: int, say: Callable[[str], None], grace: int = 300,
    forks: Sequence[Fork] = (), least: int = 1,
) -> Ending:  # fmt: skip
    """As `launcher.launch`, but the run goes on without ranks that are lost, as long as there are
    `least`. say: is told of those."""
    with scratch() as folder, _listener(folder) as listener, environment(ranks, folder):
        os.environ[SOCKET] = str(folder / "elastic")
        try:
            slots = [
                _Slot(_started(command, rank, ranks, folder, forks), rank) for rank in range(ranks)
            ]
        finally:
            del os.environ[SOCKET]
        host = Supervisor(slots, listener, least, grace, say)
        before = {number: handle(number, host.take) for number in STOPS}
        try:
            codes = host.run()
        finally:
            host.kill()
            for number, handler in before.items():
                handle(number, handler)
        failure = failure_of(folder, codes, ranks, host.stop is not None)
        return Ending(failure, host.stop or stop_of_a_rank(folder))


@contextmanager
def _listener(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        path = folder / "elastic"
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen()
        yield listener


def _started(
    command: Sequence[str], rank: int, ranks: int, folder: Path, forks: Sequence[Fork]
) -> Process:
    own = folder / str(rank)
    own.mkdir()
    environment: dict[str, Any] = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": LOCAL,
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
    }  # fmt: skip
    if forks:
        forks[rank].begin(command, environment)
        return forks[rank]
    return subprocess.Popen([*RANK, *command], env=environment, start_new_session=True)
