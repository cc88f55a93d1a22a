"""The channel between a study and the ranks of its contestants: JSON messages over a Unix socket,
which other network namespaces reach too.

    rank  -> study    {"cell": ..., "rank": 0}                        once, when it has connected
    rank  -> study    {"says": "prepared" | "epoch" | ..., ...}       what it has measured
    rank  -> study    {"says": "waiting"}                             for its turn
    study -> rank     {"mode": "timed", "steps": 7} or {"mode": "end"}
"""

import json
import socket
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from synchromesh.study.turns import Turn

END = "end"


class Channel:
    """A rank's end."""

    def __init__(self, path: str, cell: str, rank: int) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(path)
        self._link = Connection(link.detach())
        self._send({"cell": cell, "rank": rank})

    def say(self, what: str, **values: Any) -> None:
        """One message; values that JSON has a form of."""
        self._send({"says": what, **values})

    def turn(self) -> Turn | None:
        """The next turn, once it has come; None where the run shall end, or the study is gone."""
        self.say("waiting")
        try:
            answer = json.loads(self._link.recv_bytes())
        except (EOFError, OSError):
            return None
        return None if answer["mode"] == END else Turn(answer["mode"], answer["steps"])

    def _send(self, message: dict[str, Any]) -> None:
        self._link.send_bytes(json.dumps(message).encode())


class Listener:
    """The study's end: `links` by cell and rank, and what comes through them."""

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

    def messages(self, cell: str, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        """What ranks of the cell have said, waited for at most so long. A rank that is gone says
        nothing more."""
        known = {link: key for key, link in self.links.items() if key[0] == cell}
        found: list[tuple[int, dict[str, Any]]] = []
        for ready in wait([self._socket, *known], seconds):
            if ready is self._socket:
                self._accept()
                continue
            assert isinstance(ready, Connection)
            try:
                found.append((known[ready][1], json.loads(ready.recv_bytes())))
            except (EOFError, OSError):
                ready.close()
                del self.links[known[ready]]
        return found

    def grant(self, cell: str, turn: Turn | None) -> None:
        """Gives every rank of the cell its turn; None ends their run."""
        answer = {"mode": END} if turn is None else {"mode": turn.mode, "steps": turn.steps}
        for (of, _), link in list(self.links.items()):
            if of == cell:
                try:
                    link.send_bytes(json.dumps(answer).encode())
                except OSError:  # it has died; its process says why
                    continue

    def close(self) -> None:
        """Ends all links: ranks that wait for a turn end."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        self._socket.close()

    def _accept(self) -> None:
        link = Connection(self._socket.accept()[0].detach())
        try:
            hello = json.loads(link.recv_bytes())
        except (EOFError, OSError):  # it died at once
            return link.close()
        self.links[hello["cell"], hello["rank"]] = link
