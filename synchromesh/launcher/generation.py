"""Generations of an elastic run: which ranks there are, from one change to the next.

A rank and the launcher of its host speak over a unix socket, a line of JSON each:

    rank      {"slot": 2, "ready": 0}         has left all generations up to this one; a slot is of
                                              one process and never changes
              {"step": 7, "marks": {...}, "settled": 1, "still": 0.0, "waits": 0.2, "place": ...,
               "met": 1, "parted": "", "cuts": [...]}
                                              lives, has done so many steps, could take part in a
                                              run with these marks, goes on in this generation;
                                              has lost a connection with this address in one; the
                                              rest as of `Stillness`
              {"lost": "why"}                 is to be killed: it waits in a collective that has no
                                              end, or what it has computed is wrong
              {"refused": "why"}              does not go on without those that are lost
    launcher  {"generation": {...}}           once all that live are ready
              {"alone": [...]}                the others train already, with a trace that is cut
                                              there: build, and be ready then
              {"leave": true, "leaves": ...}  leave your groups, and be ready for the next; false:
                                              as a host leaves, or others come, which a run that
                                              ends need not do, nor one that takes nobody"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

SOCKET = "SYNCHROMESH_ELASTIC"  # the socket's path; set in ranks of an elastic run only
SLOT = "SYNCHROMESH_SLOT"  # of a rank's process
ADDRESS = "SYNCHROMESH_ADDRESS"  # of this host, at which ranks of others reach it


def address_of(host: str) -> str:
    """By a host's name."""
    return host.partition("/")[0]


@dataclass(frozen=True)
class Loss:
    """A rank that is lost. noticed_seconds: since it was last known to live, at most."""

    rank: int
    why: str
    noticed_seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


@dataclass(frozen=True)
class Generation:
    """One as a rank sees it. before: of each rank, which it was in the generation before, or NEW:
    it comes."""

    NEW: ClassVar = -1

    number: int  # from 1
    rank: int
    before: tuple[int, ...]
    address: str  # of its store
    port: int
    hosts: tuple[str, ...]  # of each rank
    stay: int  # the first so many ranks do; the others hold nothing from now on
    lost: tuple[Loss, ...]  # in the generation before
    began: float  # when the run did, in seconds since 1970
    ended: float  # the same of when a rank was lost last
    done: int  # steps in the one before, as far as launchers have heard

    @property
    def size(self) -> int:
        return len(self.before)

    @property
    def came(self) -> int:
        """How many ranks have, to others that train."""
        new = self.before.count(self.NEW)
        return 0 if new == self.size else new

    @property
    def anew(self) -> bool:
        """None is left of those who trained."""
        return self.number > 1 and {*self.before} == {self.NEW}


@dataclass(frozen=True)
class Regrouped:
    """A generation of an elastic run that has begun behind `from_step`. came, leave: of ranks.
    recovered_seconds: from the failed call until the plan is in force, or, where all were lost,
    from the last one on. lost_steps: that are made again, the interrupted one left out.
    state_from: "survivors", as they were, "peers", whose copies were taken, "disk", the newest
    checkpoint, or "start", as all were lost before there was one. left_out: steps of single
    workers that go on without each other, lost ones too, whose gradients servers have not got.
    why: that plan."""

    from_step: int
    hosts: int
    ranks: int
    plan: str
    lost: tuple[Loss, ...]
    came: int
    leave: int
    recovered_seconds: float
    lost_steps: int
    state_from: str = "survivors"
    left_out: int = 0
    why: str = ""

    @property
    def cause(self) -> str:
        came = [f"{self.came} rank{'s' * (self.came > 1)} came"] * bool(self.came)
        leave = [f"{self.leave} rank{'s leave' if self.leave > 1 else ' leaves'}"] * bool(
            self.leave
        )
        return "; ".join([*map(str, self.lost), *came, *leave])

    def to_dict(self) -> dict[str, Any]:
        """As `train --json` and a run's log have it."""
        noticed = max((loss.noticed_seconds for loss in self.lost), default=0.0)
        return {
            "from_step": self.from_step, "hosts": self.hosts, "ranks": self.ranks,
            "plan": self.plan, "cause": self.cause, "culprit": [loss.rank for loss in self.lost],
            "noticed_seconds": noticed, "recovered_seconds": round(self.recovered_seconds, 3),
            "lost_steps": self.lost_steps, "state_from": self.state_from,
            "left_out": self.left_out, "why": self.why,
        }  # fmt: skip

    def __str__(self) -> str:
        sources = {
            "peers": ", from copies in memory",
            "disk": ", from the newest checkpoint",
            "start": ", as there is no checkpoint",
        }
        copies = sources.get(self.state_from, "")
        again = f"; {self.lost_steps} steps are made again{copies}" if self.lost_steps else copies
        again += f"; {self.left_out} steps of single workers are left out" * bool(self.left_out)
        cause = self.cause or "ranks met anew"
        return (
            f"{cause}: {self.ranks} ranks go on behind step {self.from_step} under plan "
            f"{self.plan}{f' ({self.why})' * bool(self.why)}, after {self.recovered_seconds:.2f} s"
            f"{again}"
        )


class Wire:
    """A connection on which both sides send values, as lines of JSON."""

    MOST: ClassVar = 1 << 16  # bytes of a line

    def __init__(self, link: socket.socket) -> None:
        self.link, self._rest = link, b""
        self._sending = threading.Lock()

    def send(self, value: dict[str, Any]) -> None:
        """Nothing where the other side is gone, which `received` tells."""
        with suppress(OSError), self._sending:
            self.link.sendall(json.dumps(value).encode() + b"\n")

    def received(self) -> Iterator[dict[str, Any]]:
        """What is there, once there is something. EOFError where the other side is gone, or does
        not speak so."""
        try:
            part = self.link.recv(self.MOST)
        except OSError:
            part = b""
        if not part:
            raise EOFError
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > self.MOST:
            raise EOFError
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise EOFError
            yield value

    def close(self) -> None:
        self.link.close()


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A unix socket that its user alone may open."""
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen()
        yield listener
