"""The launcher of an elastic run on one host: its ranks, of which some may be lost.

It starts and watches its ranks, tells of them, and does what the coordinator decides
(coordinator.py). A rank that a signal ends, or that is silent, is lost: all others leave what they
wait for (engine/connections.py), and meet again in the next generation; it is started anew, builds
what it needs while they train, and comes to them. A rank that fails with an error of its own ends
the run, for the others would fail alike."""

import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM, Signals
from signal import signal as handle
from types import FrameType
from typing import Any, ClassVar, Protocol

from synchromesh.launcher import coordinator
from synchromesh.launcher.coordinator import Coordinator, HostRanks, Orders, Seat
from synchromesh.launcher.forks import Fork
from synchromesh.launcher.generation import ADDRESS, SLOT, SOCKET, Wire, listening
from synchromesh.launcher.launcher import (
    RANK,
    TUNING,
    Ending,
    Failure,
    environment,
    failure_of,
    stop_of_a_rank,
)
from synchromesh.launcher.machine import MemoryKills
from synchromesh.launcher.scratch import scratch
from synchromesh.launcher.slot import LIMITS, Process, Slot, kill, taken_record
from synchromesh.values.fault import Fault

STOPS = (SIGTERM, SIGINT, SIGHUP, SIGQUIT)
LOCAL = "127.0.0.1"
FULL = ", as memory was short: it is not started anew"


class Coordination(Protocol):
    """Tells the coordinator of this host, and what it has decided last. leads: whether this host
    is its, with which the run ends."""

    @property
    def leads(self) -> bool: ...

    def __call__(self, state: HostRanks) -> Orders: ...

    @property
    def over(self) -> bool:
        """Whether this host may go, whose ranks have ended."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class OneHost:
    """The one host of a run."""

    coordinator: Coordinator
    over: ClassVar = True
    leads: ClassVar = True

    def __call__(self, state: HostRanks) -> Orders:
        return self.coordinator.decide([state])

    def close(self) -> None:
        self.coordinator.close()


@dataclass
class LocalRanks:
    """The ranks of this host. start: the process of a slot in a place. restarts: of one rank, as
    long as no step is new. folder: of what ranks leave."""

    name: str
    ranks: int
    start: Callable[[int, int], Process]
    listener: socket.socket
    coordination: Coordination
    grace: float
    say: Callable[[str], None]
    folder: Path
    restarts: int = 0
    slots: list[Slot] = field(default_factory=list)
    orders: Orders = field(default_factory=Orders)
    stop: Signals | None = None
    refused: bool = False  # whether it ends without the ranks that are lost
    failed: str = ""  # what ends the run
    killed: bool = False  # whether ranks are being ended
    leaves: bool = False  # this host would leave
    left: bool = False  # it has
    codes: dict[int, int] | None = None  # of those that had ended then
    deadline: float = float("inf")
    looked: float = 0.0  # when it did last
    asked: float = 0.0  # to stop, the last time
    started: int = 0  # processes
    waiting: dict[int, float] = field(default_factory=dict)  # places, and when one is started
    # of places: starts without a new step, and the last step that was one
    tries: dict[int, tuple[int, int]] = field(default_factory=dict)
    alone: bool = False  # those that train take nobody
    links: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    kills: MemoryKills = field(default_factory=MemoryKills)
    notice: Path | None = None  # appears where this host is to end soon

    @property
    def live(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.code is None]

    def run(self) -> dict[int, int]:
        """Until all ranks have ended; exit codes of those whose end matters, by rank."""
        self.links.register(self.listener, selectors.EVENT_READ, None)
        self.waiting = dict.fromkeys(range(self.ranks), 0.0)
        while self.live or self.waiting or not (self.killed or self.coordination.over):
            self._start()
            for key, _ in self.links.select(TUNING.poll):
                if key.fileobj is self.listener:
                    self._greet()
                else:
                    self._hear(key.data)
            self._watch()
            if self.notice is not None and self.notice.exists():
                self.say(f"{self.notice} is there: this host is to end soon")
                self.notice = None
                self.take(SIGTERM)
            self._obey(self.coordination(self.state()))
            if time.monotonic() > self.deadline:
                self.kill()
        return self._ended() if self.codes is None else self.codes

    @property
    def _trains_here(self) -> bool:
        """Whether ranks of this host take part."""
        return self.orders.trains and self.name in {seat.host for seat in self.orders.seats}

    @property
    def _others_train(self) -> bool:
        """Whether some go on without a rank of this host that does not come to them."""
        return self._trains_here or (self.orders.trains and self.coordination.leads)

    @property
    def bare(self) -> str:
        """Why the others go on without a rank of this host; empty where that is not so."""
        lost = [slot for slot in self.slots if slot.why]
        ends = self.orders.end or self.orders.over
        if self.failed or ends or self.coordination.leads or not lost:
            return ""
        why = f"rank {lost[-1].rank} {lost[-1].why}"
        return f"this host has no rank any more, the others go on: {why}"

    def state(self) -> HostRanks:
        states = tuple(slot.state() for slot in self.slots)
        return HostRanks(self.name, states, self.failed, self.leaves, self.stop is not None)

    def _start(self) -> None:
        """The processes whose time has come."""
        if self.alone and self.orders.trains:
            return
        for place in [p for p, when in self.waiting.items() if when <= time.monotonic()]:
            del self.waiting[place]
            n, rank = self.started, self.started + (not self.coordination.leads)  # its RANK
            made = Slot(n, place, self.start(n, place), rank=rank, joins=self.orders.trains)
            self.slots.append(made)
            self.started += 1

    def _ended(self) -> dict[int, int]:
        """Exit codes; where a rank has failed by itself, without those of lost ones."""
        codes = {slot.rank: slot.code for slot in self.slots if slot.code is not None}
        return {r: c for r, c in codes.items() if c >= 0} if self.failed else codes

    def _greet(self) -> None:
        link, _ = self.listener.accept()
        self.links.register(link, selectors.EVENT_READ, Wire(link))

    def _hear(self, line: Wire) -> None:
        try:
            for message in line.received():
                match message:
                    case {"slot": int(number)}:
                        for slot in self.slots:
                            slot.line = line if slot.number == number else slot.line
                    case {"refused": str(why)} if not self.refused:
                        self.refused = True
                        self.say(f"the run ends: {why}")
                for slot in self.slots:
                    if slot.line is line:
                        slot.hear(message)
        except EOFError:
            self.links.unregister(line.link)
            line.close()

    def _watch(self) -> None:
        """Ranks that have ended since, or are silent and end now."""
        before, self.looked = self.looked, time.monotonic()
        if self.looked - before > LIMITS.away:
            for slot in self.live:
                slot.heard = self.looked
        watched, short = self.live, self.kills.lately(LIMITS.full)
        for slot in watched:
            if slot.line is not None and slot.unheard > LIMITS.silent and not self.killed:
                slot.kill(f"has been silent for {LIMITS.silent:.0f} s")
            slot.code = slot.process.poll()
        for slot in watched:
            if slot.code is not None and not self.killed:
                kill(slot.process)  # what it has started
                self._note_end(slot, slot.code, short)

    def _note_end(self, slot: Slot, code: int, short: bool) -> None:
        """It is lost, or its work is done, or it ends the run. short: memory was, lately."""
        if slot.why:
            self._start_again(slot)
        elif code < 0:
            full = code == -SIGKILL and short
            slot.why = f"was killed by {Signals(-code).name}{FULL * full}"
            if not full:
                self._start_again(slot)
        elif code > 0 and slot.generation == 0 and self._others_train:
            slot.why = "failed before it came"
            why = taken_record(self.folder / str(slot.number) / "error.json")
            self.say(f"a rank that was started anew failed: the others go on without it; {why}")
        elif code > 0:
            self.failed = f"rank {slot.rank} of host {self.name} failed"
            self.end(TUNING.end)

    def _start_again(self, slot: Slot) -> None:
        """Behind a pause, unless it was done too often without a step that is new."""
        count, furthest = self.tries.get(slot.place, (0, 0))
        count = 1 if slot.steps > furthest else count + 1
        self.tries[slot.place] = count, max(slot.steps, furthest)
        self.alone = bool(slot.settled) and not slot.marks
        if count <= self.restarts and self.stop is None and not self.leaves:
            self.waiting[slot.place] = time.monotonic() + LIMITS.again * 2 ** (count - 1)

    def _obey(self, orders: Orders) -> None:
        if self.killed:
            return
        self.orders = orders
        if orders.why(self.name):
            return self.end(0 if orders.apart else TUNING.end)
        if self.name in orders.asked and not (self.leaves or self.stop):
            self.take(SIGTERM)
        self.slots = [s for s in self.slots if s.code is None or s.generation >= orders.number]
        for slot in self.live:
            slot.obey(Seat(self.name, slot.number), orders)
            self._kill_left_behind(slot)
        if orders.over:
            self.waiting.clear()
        if self.name in orders.may_go:
            self.left = True
            self.kill("has left")
        elif orders.stop and all(slot.settled == orders.number for slot in self.live):
            self._stop(SIGTERM)

    def _kill_left_behind(self, slot: Slot) -> None:
        """Ends one with whom the others do not go on."""
        orders, seat = self.orders, Seat(self.name, slot.number)
        had = slot.generation > 0 or ((slot.joins or slot.alone) and not orders.trains)
        if seat in orders.late:
            slot.kill(
                f"did not come to where the others meet within {coordinator.LIMITS.meet:.0f} s"
                if orders.leave else
                f"stood still for {slot.still:.0f} s ({slot.doing}) while all others waited"
            )  # fmt: skip
        elif seat not in orders.seats and (had or orders.over):
            slot.kill("was left behind by the others")

    def take(self, number: int, frame: FrameType | None = None) -> None:
        """A signal goes to all ranks, but on a host that may leave it does; a second one kills
        them."""
        before, self.asked = self.asked, time.monotonic()
        if self.stop is not None or self.leaves:  # one for all processes of a job comes twice
            return self.kill() if self.asked - before > LIMITS.twice else None
        if not self.coordination.leads and self.orders.trains:
            if not self._trains_here:
                self.left = True
                return self.kill("has left")
            self.leaves, self.deadline = True, time.monotonic() + self.grace
            self.waiting.clear()
            return self.say("this host leaves when others hold what its ranks have")
        self._stop(number)

    def _stop(self, number: int) -> None:
        if self.stop is not None:
            return
        self.stop, self.deadline = Signals(number), time.monotonic() + self.grace
        self.waiting.clear()
        for slot in self.live:  # which stop together, and meet before where some are lost
            with suppress(ProcessLookupError):
                os.killpg(slot.process.pid, number)

    def end(self, seconds: float) -> None:
        """Ranks may end within so many seconds."""
        if self.killed:
            return
        self.killed, self.deadline = True, time.monotonic() + seconds
        self.codes = self._ended()
        self.waiting.clear()
        for slot in self.live:
            with suppress(ProcessLookupError):
                os.killpg(slot.process.pid, SIGTERM)

    def close(self) -> None:
        for key in [*self.links.get_map().values()]:
            if key.data is not None:
                key.data.close()
        self.links.close()
        self.coordination.close()

    def kill(self, why: str = "") -> None:
        self.killed = True
        self.waiting.clear()
        for slot in self.live:
            slot.kill(why)


@dataclass(frozen=True)
class HostJob:
    """What a host runs of an elastic run. command: of a rank. say: is told of those that are lost.
    restarts: of one, without a step in between. notice: a file that says, once it is there, that
    this host is to end soon."""

    command: Sequence[str]
    ranks: int
    say: Callable[[str], None]
    grace: int = 300
    forks: Sequence[Fork] = ()
    restarts: int = 0
    errors: int = 2
    notice: Path | None = None

    def run(self, name: str, address: str, coordination: Coordination) -> Ending:
        """Until its end. name: of this host, which others reach at `address`."""
        with (
            scratch() as folder,
            listening(folder / "elastic") as listener,
            environment(self.ranks, folder),
        ):
            shared = {**os.environ, SOCKET: str(folder / "elastic"), ADDRESS: address}
            here: LocalRanks

            def started(slot: int, place: int) -> Process:
                own = folder / str(slot)
                own.mkdir()
                variables: dict[str, Any] = {
                    **shared, SLOT: str(slot), "RANK": str(slot + (not coordination.leads)),
                    "LOCAL_RANK": str(place), "WORLD_SIZE": str(self.ranks),
                    "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": address,
                    "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
                }  # fmt: skip
                return self._start(slot, variables)

            here = LocalRanks(
                name, self.ranks, started, listener, coordination, self.grace, self.say, folder,
                self.restarts, notice=self.notice,
            )  # fmt: skip
            before = {number: handle(number, here.take) for number in STOPS}
            try:
                codes = here.run()
            finally:
                here.kill()
                here.close()
                for number, handler in before.items():
                    handle(number, handler)
            if here.left:
                return Ending()
            failure = failure_of(folder, codes, self.ranks, here.stop is not None)
            why = here.orders.why(name) or here.bare
            if (failure is None or here.bare) and why and here.stop is None:
                failure = Failure(0, self.ranks, 1, Fault(why, "", 1))
            return Ending(failure, here.stop or stop_of_a_rank(folder))

    def _start(self, slot: int, variables: Mapping[str, str]) -> Process:
        if slot < len(self.forks):
            self.forks[slot].begin(self.command, variables)
            return self.forks[slot]
        return subprocess.Popen(
            [*RANK, *self.command], env=variables, stderr=self.errors, start_new_session=True
        )


def launch(
    command: Sequence[str], ranks: int, say: Callable[[str], None], grace: int = 300,
    forks: Sequence[Fork] = (), least: int = 1, restarts: int = 0,
) -> Ending:  # fmt: skip
    """As `launcher.launch`, but the run goes on without ranks that are lost, as long as there are
    `least`, and others come in their place; the rest as of `HostJob`."""
    job = HostJob(command, ranks, say, grace, forks, restarts)
    coordinator = Coordinator(LOCAL, LOCAL, say, ranks=0 if restarts else least)
    return job.run(LOCAL, LOCAL, OneHost(coordinator))
