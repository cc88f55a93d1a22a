"""The sockets of a process's groups, and how a rank leaves a collective that will not end.

gloo has no abort: a call that waits for a rank that is dead or silent returns when the time-out of
its group is over, whatever another thread does with the group. But its sockets are this process's
own: where they are shut down (`shutdown(2)`) the call fails at once. A neighbour of a dead rank
fails by itself within 20 ms; the others would wait for that neighbour."""

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

DESCRIPTORS = "/proc/self/fd"


class Connections:
    """Those that opened inside of `noted`. `cut` may be called from any thread, also meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._others: dict[int, int] | None = (
            None  # sockets from before a group that is being made
        )
        self._noted: dict[int, int] = {}  # inode by descriptor

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Sockets that open inside belong to groups, and what they need."""
        with self._lock:
            outer = self._others
            self._others = _sockets() if outer is None else outer
        try:
            yield
        finally:
            with self._lock:
                self._note()
                self._others = outer

    def _note(self) -> None:
        if self._others is not None:
            self._noted |= dict(_sockets().items() - self._others.items())

    def cut(self) -> None:
        """What waits at one of them fails now; what comes to one fails at once."""
        with self._lock:
            self._note()
            for descriptor, inode in self._noted.items():
                _shut(descriptor, inode)

    def forget(self) -> None:
        """The groups are destroyed; descriptors may be of something else from now on."""
        with self._lock:
            self._noted.clear()


def _sockets() -> dict[int, int]:
    """The inode of each socket of this process, by descriptor (Linux)."""
    found = {}
    with suppress(OSError):  # a system without /proc
        for name in os.listdir(DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[int(name)] = status.st_ino
    return found


def _shut(descriptor: int, inode: int) -> None:
    """Shuts a connection down, if the descriptor is still of that socket. One that listens is left
    alone: gloo's thread would end the process, as it takes that for an error of its own."""
    with suppress(OSError):
        own = os.dup(descriptor)  # stays that socket, whatever happens to the other
        if os.fstat(own).st_ino != inode:
            os.close(own)
            return
        with socket.socket(fileno=own) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
