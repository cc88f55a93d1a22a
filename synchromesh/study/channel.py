"""The channel between a study and the ranks of its contestants: values over a Unix socket, which
other network namespaces reach too.

    rank  -> study    `Hello`                once, when it has connected
    rank  -> study    a `RunEvent`           what it has measured (runs/events.py)
    rank  -> study    `WAITING`              for its turn
    study -> rank     a `Turn`, or None      which ends its run"""

import os
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from synchromesh.runs.events import RunEvent
from synchromesh.study.turns import Turn

WAITING = "waiting"


class Hello(NamedTuple):
    cell: str
    rank: int
    process: int


class Channel:
    def __init__(self, path: str, cell: str, rank: int) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self._link: Connection[Any, Any] = Connection(link.detach())
        self._link.send(Hello(cell, rank, os.getpid()))

    def say(self, event: RunEvent) -> None:
        self._link.send(event)

    def turn(self) -> Turn | None:
        """The next turn, once it has come; None where the run shall end, or the study is gone."""
        self._link.send(WAITING)
        turn: Turn | None = None
        with suppress(EOFError, OSError):
            turn = self._link.recv()
        return turn


class Listener:
    """The study's end: `links` by cell and rank, and what comes through them.

    A cell may be suspended while its ranks wait. gloo's threads wake every 10 ms even then: with
    eight ranks that waited, steps on one emulated host took 165 to 180 ms, suspended 149."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "study")
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(self.path)
        except OSError as error:  # Linux: 108 characters
            self._socket.close()
            raise ValueError(
                f"{self.path} cannot be a socket ({error}): set TMPDIR to a folder with a shorter "
                "path that can be written to"
            ) from None
        self._socket.listen(256)
        self.links: dict[tuple[str, int], Connection] = {}
        self._processes: dict[tuple[str, int], int] = {}  # that can be suspended

    def messages(self, cell: str, seconds: float) -> list[tuple[int, RunEvent | str]]:
        """What ranks of the cell have said, waited for at most so long; none of those gone."""
        known = {link: key for key, link in self.links.items() if key[0] == cell}
        heard: list[tuple[int, RunEvent | str]] = []
        for ready in wait([self._socket, *known], seconds):
            if ready is self._socket:
                self._accept()
                continue
            assert isinstance(ready, Connection)
            try:
                heard.append((known[ready][1], ready.recv()))
            except (EOFError, OSError):
                ready.close()
                del self.links[known[ready]]
                self._processes.pop(known[ready], None)
        return heard

    def grant(self, cell: str, turn: Turn | None) -> None:
        """Gives every rank of the cell its turn; None ends their run."""
        for (of, _), link in list(self.links.items()):
            if of == cell:
                with suppress(OSError):  # it has died; its process says why
                    link.send(turn)

    def suspend(self, cell: str) -> None:
        """Stops the cell's ranks, all of which wait, until `resume`."""
        self._signal(cell, signal.SIGSTOP)

    def resume(self, cell: str) -> None:
        """Lets them go on, if they were suspended."""
        self._signal(cell, signal.SIGCONT)

    def _signal(self, cell: str, number: signal.Signals) -> None:
        for (of, _), process in self._processes.items():
            if of == cell:
                with suppress(ProcessLookupError):  # it has just died
                    os.kill(process, number)

    def close(self) -> None:
        """Ends all links: ranks that wait for a turn end."""
        for cell in {of for of, _ in self.links}:
            self.resume(cell)
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._socket.close()

    def _accept(self) -> None:
        link = Connection(self._socket.accept()[0].detach())
        try:
            cell, rank, process = link.recv()
        except (EOFError, OSError):  # it died at once
            return link.close()
        key = cell, rank
        self.links[key] = link
        if process != os.getpid() and sys.platform == "linux":  # where it dies with the study
            self._processes[key] = process
