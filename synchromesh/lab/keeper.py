"""A lab's keeper: a process as whose end the lab ends, `python -m synchromesh.lab.keeper`.

It holds the reading end of a pipe. When the owner of the lab closes it, or dies in whichever way,
the keeper kills what runs in the hosts and removes them. One byte through the pipe sets it free:
it then stays, the lab with it, until SIGTERM (`synchromesh lab down`).
"""

import os
import signal
from types import FrameType

from synchromesh.lab import cgroup
from synchromesh.lab.record import Records
from synchromesh.lab.removal import remove
from synchromesh.lab.tag import Tag

READY, STAY = b"r", b"s"


class _Ended(Exception):
    """SIGTERM has come."""


def main() -> None:
    tag, groups = Tag.of(os.getpid()), cgroup.detect()
    assert tag is not None and groups is not None, "the owner has looked: requirements.py"
    # Imported now: what is needed at the end may be gone from the disk by then.
    import pyroute2  # noqa: F401

    os.chdir("/")  # holds no folder
    for number in (signal.SIGINT, signal.SIGHUP):  # of the owner's terminal
        signal.signal(number, signal.SIG_IGN)
    try:
        signal.signal(signal.SIGTERM, _end)
        os.write(1, READY)
        if os.read(0, 1) == STAY:
            _let_go()
            while True:
                signal.pause()
    except _Ended:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    remove(tag, groups, Records())


def _let_go() -> None:
    """Hold none of the streams of the command that brought the lab up."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


if __name__ == "__main__":
    main()
