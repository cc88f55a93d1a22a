"""A rank of an elastic run as its launcher's counterpart: it says that it lives, hears which ranks
are lost, and gets the next generation."""

import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from synchromesh.launcher.generation import SLOT, SOCKET, Generation, Loss, Wire, address_of
from synchromesh.launcher.rank import fall_silent, speak
from synchromesh.launcher.stillness import Stillness, in_collective, places
from synchromesh.values.fault import LOST, PARTED, message
from synchromesh.values.fields import of_plain


@dataclass(frozen=True)
class MemberTuning:
    """Seconds; chosen."""

    beat: float = 0.2  # between two words of life
    again: float = 0.05  # between two cuts, until the rank has left its groups
    stuck: float = 5.0  # in one collective, behind a cut: it will not end (seen with gloo)
    told: float = 10.0  # for the launcher to tell of a loss that a rank has seen by itself


TUNING = MemberTuning()


class NoGeneration(RuntimeError):
    """There is none: the launcher has ended."""


class Member:
    """cut: leaves what this rank waits for in a collective, of any thread."""

    def __init__(self, path: str, slot: int) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self.cut: Callable[[], None] = lambda: None
        self.slot = slot
        self.steps = 0  # done here
        self.marks: dict[str, str] = {}  # of what this rank could take part in
        self.cuts: tuple[str, ...] = ()  # of the trace here, or of those to whom it comes
        self.settled = 0  # the generation in which it goes on
        self.parted = ""  # as `RankState`
        self.lost: tuple[Loss, ...] = ()  # in the generation before
        self.hosts: tuple[str, ...] = ()  # of each rank of this generation
        self.replicate = "off"  # as of `fit`
        self.copying: tuple[str, ...] = ()  # `hosts`, where plans are to have room for copies
        self.came = self.stay = 0  # how many of its ranks have come, and stay
        self.anew, self.began, self.ended, self.done = False, 0.0, 0.0, 0  # as `Generation`
        self.opened = False  # it has begun
        self._line = Wire(link)
        self.number = 0  # of the generation
        self._told = threading.Event()
        self._asked = threading.Event()  # the same, but also where it goes on all the same
        self.over = False  # nobody can come any more
        self._seen: tuple[Any, float] | None = None  # where the main thread is, and since when
        self._stillness = Stillness()
        self._next: queue.Queue[Generation | str | None] = queue.Queue()
        threading.Thread(target=self._run, daemon=True, name="elastic member").start()

    def begin(self) -> Generation | None:
        """The first generation of this rank; None where others train already, to which it comes
        when it has built what it needs."""
        self._say()
        self._line.send({"slot": self.slot, "ready": self.number})
        return self._taken(self._next.get())

    def next(self) -> Generation:
        """This rank has left its groups; the next generation. NoGeneration where there is none."""
        found = self.begin()
        while found is None:  # said before it was ready
            found = self._taken(self._next.get())
        return found

    def _taken(self, found: Generation | str | None) -> Generation | None:
        if isinstance(found, str):
            raise NoGeneration(found)
        if found is not None:
            self.parted = ""  # before the number, as of `_say`
            self.number, self.hosts, self.stay = found.number, found.hosts, found.stay
            self.lost, self.came, self.anew = found.lost, found.came, found.anew
            self.began, self.ended, self.done = found.began, found.ended, found.done
            self.copying = () if self.replicate == "off" else self.hosts
            os.environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.size))
            (fall_silent if found.rank else speak)()
        return found

    def offer(self, marks: dict[str, str]) -> None:
        """Of what this rank could take part in; none: nobody can come for now."""
        self.marks = marks
        if marks and self._asked.is_set():
            self._told.set()

    def refuse(self, why: str) -> None:
        """The run does not go on without the ranks that are lost."""
        self._line.send({"refused": why})

    def give_up(self, why: str) -> None:
        """The launcher kills this rank."""
        self._line.send({"lost": why})

    @property
    def told(self) -> bool:
        """Whether a rank of this generation is lost, or others come."""
        return self._told.is_set()

    def hears_of_loss(self, said: str) -> bool:
        """The same, of a call that has failed as if one were: the launcher may know it later, and
        sooner from what is said of it. Where nobody else is lost this rank is, and is killed."""
        if (found := PARTED.search(said)) is not None:
            rank, address = found.groups()
            hosts = dict(enumerate(self.hosts))
            self.parted = address or address_of(hosts.get(int(rank), ""))
            self._say()
        if not self._asked.wait(TUNING.told):
            self.give_up("has lost its connections, and no other rank is lost")
        return self._asked.wait(TUNING.told)

    def of_a_loss(self, error: Exception) -> bool:
        """Whether `error` is of ranks that are lost, or come; the launcher may know it later."""
        said = message(error)
        return self.told or (bool(LOST.search(said)) and self.hears_of_loss(said))

    def _run(self) -> None:
        there = select.poll()  # files may have numbers above those that `select` takes
        there.register(self._line.link, select.POLLIN)
        while True:
            pause = TUNING.again if self._told.is_set() else TUNING.beat
            if there.poll(1000 * pause):
                try:
                    for message in self._line.received():
                        self._take(message)
                except EOFError:  # the launcher has ended, and this process is about to
                    self._next.put("its launcher has ended")
                    return
            else:
                self._say()
            if self._told.is_set():
                self.cut()
                self._look()
            else:
                self._seen = None

    def _look(self) -> None:
        """Says so where the main thread waits in a collective that does not end."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        here = None if frame is None else (id(frame), frame.f_lasti)
        if frame is None or self._seen is None or self._seen[0] != here:
            self._seen = here, time.monotonic()
        elif time.monotonic() - self._seen[1] > TUNING.stuck and in_collective(frame):
            self.give_up(f"did not leave a collective ({places(frame, Stillness.DEPTH)})")

    def _say(self) -> None:
        own = self._stillness
        own.look(self.steps)
        self._line.send({
            "step": self.steps, "marks": self.marks, "settled": self.settled,
            "still": own.still, "waits": own.waits, "place": own.place, "met": self.number,
            "parted": self.parted, "cuts": self.cuts,
        })  # fmt: skip

    def _take(self, message: dict[str, object]) -> None:
        match message:
            case {"generation": _}:
                self._told.clear()
                self._asked.clear()
                self._next.put(of_plain(Generation, message["generation"], "generation"))
            case {"alone": list(cuts)}:
                self.cuts = tuple(map(str, cuts))
                self._next.put(None)
            case {"leave": bool(lost), "leaves": bool(leaves)}:
                self._asked.set()
                if lost or (not self.over and (leaves or self.marks)):
                    self._told.set()


@cache
def _member(path: str, slot: int) -> Member:
    return Member(path, slot)


def member(env: Mapping[str, str] = os.environ) -> Member | None:
    """Of this process, None where the run is not elastic."""
    path = env.get(SOCKET)
    return None if path is None else _member(path, int(env[SLOT]))
