"""A process of an elastic run's host, which may be a rank of every generation."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from synchromesh.launcher.coordinator import Orders, RankState, Seat
from synchromesh.launcher.forks import Fork
from synchromesh.launcher.generation import Generation, Wire
from synchromesh.values.fields import to_plain


@dataclass(frozen=True)
class ElasticTuning:
    """Seconds; chosen. A pause of 3 is no fault."""

    silent: float = 4.0  # without a word of life
    away: float = 1.0  # between two looks of the launcher: then it was away itself
    twice: float = 1.0  # between two signals that are one
    restarts: int = 3  # of a rank without a step in between
    full: float = 5.0  # since the kernel killed for memory, until a rank that it killed has ended
    again: float = 1.0  # until a rank is started anew; twice as long each time without a step


LIMITS = ElasticTuning()

Process = Fork | subprocess.Popen[bytes]


def kill(process: Process) -> None:
    """And what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, SIGKILL)


def taken_record(file: Path) -> str:
    """What a rank has left there of its error, which counts no longer."""
    try:
        left: str = json.loads(file.read_text())["synchromesh"]["sentence"]
    except OSError:
        return "it left no error"
    file.unlink()
    return left or "it left an exit code alone"


@dataclass
class Slot:
    """One process. place: its number among the ranks that this host has at a time."""

    number: int
    place: int
    process: Process
    line: Wire | None = None
    ready: int = Generation.NEW  # as `RankState`, like the next two
    marks: dict[str, str] = field(default_factory=dict)
    settled: int = 0
    steps: int = 0
    heard: float = 0.0
    code: int | None = None
    why: str = ""  # it was lost
    generation: int = 0  # that it was given last
    rank: int = 0  # in it
    still: float = 0.0  # as of `Stillness`, like the next two
    waits: float = 0.0
    doing: str = ""
    met: int = 0  # as `RankState`, like the next two
    parted: str = ""
    cuts: tuple[str, ...] = ()
    leaves: int = 0  # `Orders.urgency`, as far as it was told
    alone: bool = False  # was told to build
    joins: bool = False  # was started while others trained

    @property
    def unheard(self) -> float:
        """Seconds without a word."""
        return time.monotonic() - self.heard

    def state(self) -> RankState:
        return RankState(
            self.number, self.ready, self.marks, self.settled, self.steps, self.why, self.unheard,
            self.code == 0, self.joins or self.alone, self.still, self.waits,
            self.met, self.parted, self.cuts,
        )  # fmt: skip

    def kill(self, why: str = "") -> None:
        kill(self.process)
        self.process.wait()
        self.why = self.why or why

    def hear(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"step": int(steps), "marks": dict(marks), "settled": int(settled)}:
                self.steps, self.marks, self.settled = steps, marks, settled
                self.still, self.waits = float(message["still"]), float(message["waits"])
                self.doing, self.cuts = str(message["place"]), tuple(message["cuts"])
                self.met, self.parted = int(message["met"]), str(message["parted"])
            case {"ready": int(ready)}:
                self.ready = ready
            case {"lost": str(why)}:
                self.kill(why)
        self.heard = time.monotonic()

    def obey(self, seat: Seat, orders: Orders) -> None:
        """Hands on what is for this rank."""
        if self.line is None:
            return
        own = orders.generation(seat)
        if own is None:
            if orders.trains and not (self.ready or self.alone):
                self.alone = True
                self.line.send({"alone": orders.cuts})
        elif self.generation < orders.number:
            self.generation, self.rank, self.leaves = orders.number, own.rank, 0
            self.line.send({"generation": to_plain(own)})
        elif orders.urgency > self.leaves:
            self.leaves = orders.urgency
            self.line.send({"leave": bool(orders.lost), "leaves": orders.leaves})
