"""Faults of hosts in a run over a lab: what happens to a host, how it comes back, and what the
run says of it. Every fault ends when all hosts take part again."""

import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from benchmarks.hosts import BANDWIDTH, HOSTS, Run
from benchmarks.troubles import TROUBLES

HANG = 60.0  # seconds without a step
BACK = 60.0  # seconds for a host to come to the others
FROZEN, PAUSED, SLOWED, SLOW = 8.0, 3.0, 8.0, "20mbit"
LOST = re.compile(r"rank (\d+) ")
ADDRESS = re.compile(r"is of host ([^/,]+)")


class Broken(RuntimeError):
    """The run does not go on."""


class Over(RuntimeError):
    """The run has ended as it should."""


class Hang(Broken):
    """No step was made for too long."""


@dataclass(frozen=True)
class Act:
    """Something was done to a host, so many seconds behind the beginning."""

    seconds: float
    word: str
    host: int


@dataclass
class Stage:
    """A run with four hosts, and what was done to them. order: the host of each rank. stalled:
    the longest time without a step in the log, in seconds. wrong: sentences."""

    run: Run
    chance: random.Random
    began: float = field(default_factory=time.time)
    acts: list[Act] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    order: list[int] = field(default_factory=lambda: [*range(HOSTS)])
    gone: set[int] = field(default_factory=set)  # hosts that are not to run anything now
    stalled: float = 0.0
    named: set[int] = field(default_factory=set)  # hosts that the run has lost lately
    left: list[int] = field(default_factory=list)  # that were asked to leave lately
    anew: list[str] = field(default_factory=list)  # of launchers that ended by themselves lately
    _read: int = 0  # changes
    _step: int = 0
    _stepped: float = field(default_factory=time.monotonic)

    def act(self, word: str, host: int) -> None:
        """Does it, and notes when."""
        self.acts.append(Act(time.time() - self.began, word, host))
        perform(self.run, word, host)
        if word in ("kill", "cut", "leave"):
            self.gone.add(host)
        elif word == "join":
            self.gone.discard(host)

    def look(self) -> None:
        """Reads what is new. Hang where no step was made for too long, Broken where it failed,
        Over where it has ended."""
        for change in self.run.logged("generation")[self._read :]:
            self._read += 1
            self._take(change)
        if self.run.step != self._step:
            self._step, self._stepped = self.run.step, time.monotonic()
        waited = time.monotonic() - self._stepped
        self.stalled = max(self.stalled, waited)
        if (code := self.run.launchers[0].process.poll()) is not None:
            raise Broken(f"the run failed behind step {self._step}") if code else Over
        if waited > HANG:
            raise Hang(f"no step behind {self._step} for {HANG:.0f} s")

    def _take(self, change: dict[str, Any]) -> None:
        """Follows which host each rank is on."""
        before, lost = self.order, set()
        for part in change["cause"].split("; "):
            if found := LOST.match(part):
                lost.add(self._host(part, int(found[1]), before))
        self.named |= lost
        stay = [h for h in before if h not in lost]
        if came := re.search(r"(\d+) ranks? came", change["cause"]):
            away = [h for h in range(HOSTS) if h not in stay]
            stay += sorted(away, key=lambda h: (h in self.gone, self._last(h)))[: int(came[1])]
        leaves = [h for h in self.left if h in stay] if "leave" in change["cause"] else []
        self.order = [h for h in stay if h not in leaves] + leaves
        if len(self.order) != change["ranks"]:
            self.wrong.append(
                f"{change['ranks']} ranks go on behind step {change['from_step']}, where hosts "
                f"{self.order} were expected: {change['cause']}"
            )

    def _host(self, text: str, rank: int, before: list[int]) -> int:
        if address := ADDRESS.search(text):
            return self._addresses.index(address[1])
        return before[rank] if rank < len(before) else -1

    @property
    def _addresses(self) -> list[str]:
        return [state.address for state in self.run.lab.states()]

    def _last(self, host: int) -> float:
        """When something was done to a host last."""
        return max((a.seconds for a in self.acts if a.host == host), default=0.0)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Whether it holds within so many seconds."""
        limit = time.monotonic() + seconds
        while not holds():
            self.look()
            if time.monotonic() > limit:
                return False
            time.sleep(0.05)
        self.look()
        return True

    def wait(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def whole(self) -> bool:
        """Whether a rank of every host takes part, of which none leaves."""
        self.look()
        changes = self.run.logged("generation")
        leaves = bool(changes) and "@ranks" in changes[-1]["plan"]
        return sorted(self.order) == [*range(HOSTS)] and not leaves

    def restore(self) -> None:
        """Waits until all hosts take part; one that ended by itself is joined anew."""
        for _ in range(3):
            limit = time.monotonic() + BACK
            while not self.until(self.whole, 1.0) and time.monotonic() < limit:
                for host in [*range(1, HOSTS)]:
                    if self.run.launchers[host].ended and host not in self.gone:
                        said = "".join(self.run.launchers[host].told[-1:]).strip()
                        self.anew.append(f"host {host} ended by itself: {said}")
                        self.act("join", host)
            if self.whole():
                return
            for host in sorted({*range(1, HOSTS)} - {*self.order}):
                self.wrong.append(f"host {host} did not come within {BACK:.0f} s")
                self.act("kill", host)
                self.act("join", host)
        raise Broken("hosts do not come back")

    def back(self, host: int) -> None:
        """Joins a host, and waits until it takes part."""
        self.act("join", host)
        self.until(lambda: host in self.order, BACK)


def ranks_of(run: Run, host: int) -> list[int]:
    """Process ids of a host's ranks, children of its launcher."""
    pid = run.launchers[host].process.pid
    with suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def perform(run: Run, word: str, host: int) -> None:
    """One of the words of an `Act`."""
    match word:
        case "rank":
            for pid in ranks_of(run, host):
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
        case "slow":
            run.lab.set(host, bandwidth=SLOW)
        case "quick":
            run.lab.set(host, bandwidth=BANDWIDTH)
        case "join":
            run.join(host)
        case "leave":
            run.leave(host)
        case "kill" | "freeze" | "thaw" | "cut" | "heal":
            getattr(run.lab, word)(host)
        case _ if word in TROUBLES:
            new = run.folder / f"new-{host}"
            new.write_text(word)
            new.rename(run.folder / f"trouble-{host}")
        case _:
            raise ValueError(f"no act {word!r}")


# ---- faults: each is done to a host, and yields the hosts that the run is to name


def kill(stage: Stage, host: int) -> set[int]:
    """All processes of a host; it joins again some seconds later."""
    stage.act("kill", host)
    stage.until(lambda: host not in stage.order, BACK)
    stage.wait(stage.chance.uniform(1, 6))
    stage.back(host)
    return {host}


def rank(stage: Stage, host: int) -> set[int]:
    """The rank of a host, whose launcher starts another one."""
    stage.act("rank", host)
    stage.until(lambda: host in stage.named, BACK)
    return {host}


def freeze(stage: Stage, host: int) -> set[int]:
    """All of a host stands still for 8 s, and goes on then."""
    stage.act("freeze", host)
    stage.wait(FROZEN)
    stage.act("thaw", host)
    return {host}


def pause(stage: Stage, host: int) -> set[int]:
    """A link is cut for 3 s, which is to change nothing."""
    stage.act("cut", host)
    stage.wait(PAUSED)
    stage.act("heal", host)
    stage.gone.discard(host)
    stage.wait(4.0)
    return set()


def cut(stage: Stage, host: int) -> set[int]:
    """A link is cut until all of the host has ended; it joins again."""
    stage.act("cut", host)
    if not stage.until(lambda: not stage.run.processes(host), BACK):
        stage.wrong.append(f"host {host}, cut off, has not ended within {BACK:.0f} s")
        stage.act("kill", host)
    stage.until(lambda: host not in stage.order, BACK)
    stage.act("heal", host)
    stage.back(host)
    return {host}


def leave(stage: Stage, host: int) -> set[int]:
    """A host leaves by SIGTERM, and joins again."""
    _leave(stage, host)
    _leaving_ends(stage, host)
    stage.back(host)
    return {host}


def _leave(stage: Stage, host: int) -> None:
    stage.left = [host]
    stage.act("leave", host)


def _leaving_ends(stage: Stage, host: int) -> None:
    if not stage.until(lambda: stage.run.launchers[host].ended, BACK):
        stage.wrong.append(f"host {host} has not left within {BACK:.0f} s")
        stage.act("kill", host)
    stage.until(lambda: host not in stage.order, BACK)


def checkpoint(stage: Stage, host: int) -> set[int]:
    """The rank of a host, while a checkpoint is written."""
    folder, limit = stage.run.folder / "run" / "checkpoints", time.monotonic() + BACK
    before = {*folder.glob(".*.new-*")}
    while not {*folder.glob(".*.new-*")} - before and time.monotonic() < limit:
        time.sleep(0.002)
    time.sleep(stage.chance.uniform(0, 0.1))
    return rank(stage, host)


def recovery(stage: Stage, host: int) -> set[int]:
    """A host, and another one while the first one's loss is dealt with."""
    other = stage.chance.choice([h for h in range(1, HOSTS) if h != host])
    told = stage.run.launchers[0].told
    before = len(told)
    stage.act("kill", host)
    stage.until(lambda: any("gone" in x or "killed" in x for x in told[before:]), BACK)
    time.sleep(stage.chance.uniform(0, 0.5))
    stage.act("kill", other)
    stage.until(lambda: not {host, other} & {*stage.order}, BACK)
    stage.wait(stage.chance.uniform(1, 4))
    stage.back(host)
    stage.back(other)
    return {host, other}


def switch(stage: Stage, host: int) -> set[int]:
    """A host leaves, and another one is killed while what the first one holds is handed over."""
    other = stage.chance.choice([h for h in range(1, HOSTS) if h != host])
    _leave(stage, host)
    time.sleep(stage.chance.uniform(0, 1.5))
    stage.act("kill", other)
    _leaving_ends(stage, host)
    stage.until(lambda: other not in stage.order, BACK)
    stage.back(host)
    stage.back(other)
    return {host, other}


def slow(stage: Stage, host: int) -> set[int]:
    """A link has a tenth of its rate for 8 s, which is to change nothing."""
    stage.act("slow", host)
    stage.wait(SLOWED)
    stage.act("quick", host)
    stage.wait(4.0)
    return set()


def nan(stage: Stage, host: int) -> set[int]:
    """A row is not finite: all leave the step out."""
    told = stage.run.launchers[0].told
    before = len(told)
    stage.act("nan", host)
    if not stage.until(lambda: any("is left out" in text for text in told[before:]), BACK):
        stage.wrong.append(f"a row of host {host} that is not finite was not told")
    return set()


def inside(word: str) -> Callable[[Stage, int], set[int]]:
    """A word of `TROUBLES`, for which the rank is lost; its launcher starts another one."""

    def trouble(stage: Stage, host: int) -> set[int]:
        stage.act(word, host)
        stage.until(lambda: host in stage.named, BACK)
        return {host}

    return trouble


def memory(stage: Stage, host: int) -> set[int]:
    """A rank takes all memory of its host, on which none is started anew; it joins again."""
    inside("memory")(stage, host)
    stage.act("kill", host)
    stage.wait(stage.chance.uniform(1, 4))
    stage.back(host)
    return {host}


@dataclass(frozen=True)
class Fault:
    """row: of the table of faults in shared/RELIABILITY.md. says: in the cause that the run tells.
    noticed, again: what is expected, seconds at most since the last word of whom it hits, and
    from the fault on."""

    do: Callable[[Stage, int], set[int]]
    row: str
    says: str = ""
    noticed: float = 0.5
    again: float = 4.0


FAULTS = {
    "kill": Fault(kill, "F2", "gone"),
    "rank": Fault(rank, "F1", "SIGKILL"),
    "abort": Fault(inside("abort"), "F1", "SIGABRT"),
    "freeze": Fault(freeze, "F5", "gone", 5.0, 9.0),
    "gil": Fault(inside("gil"), "F5", "silent", 5.0, 9.0),
    "pause": Fault(pause, "F9"),
    "slow": Fault(slow, "F7"),
    "cut": Fault(cut, "F8", "gone", 5.0, 9.0),
    "leave": Fault(leave, "F46", "leaves"),
    "checkpoint": Fault(checkpoint, "F11", "SIGKILL"),
    "switch": Fault(switch, "F13", "gone"),
    "recovery": Fault(recovery, "F14", "gone"),
    "nan": Fault(nan, "F23"),
    "flip": Fault(inside("flip"), "F26", "differs", 0.5, 10.0),
    "hang": Fault(inside("hang"), "F31", "stood still", 0.5, 15.0),
    "memory": Fault(memory, "F33", "memory was short"),
}
