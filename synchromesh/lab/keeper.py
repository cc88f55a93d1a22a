"""A lab's keeper: the process that removes the lab, `python -m synchromesh.lab.keeper`.

It has the reading end of a pipe. When the owner of the lab closes the pipe, or dies in whichever
way, the keeper kills what runs in the hosts and removes them. One byte through the pipe makes it
independent of its owner: it then keeps the lab until SIGTERM (`synchromesh lab down`)."""

import os
import signal
from types import FrameType

from synchromesh.lab import cgroup
from synchromesh.lab.keeper_process import READY, STAY
from synchromesh.lab.record import Records
from synchromesh.lab.removal import remove
from synchromesh.lab.tag import Tag


class _Ended(Exception):
    """SIGTERM has come."""


def main() -> None:
    """Watch over the lab whose tag is this process, and remove it at the end."""
    tag, groups = Tag.of(os.getpid()), cgroup.detect()
    assert tag is not None and groups is not None, "the owner has called requirements.require"
    # Imported now: what is needed at the end may be gone from the disk by then.
    import pyroute2  # noqa: F401

    os.chdir("/")  # so that no other file system is in use
    for number in (signal.SIGINT, signal.SIGHUP):  # of the owner's terminal
        signal.signal(number, signal.SIG_IGN)
    try:
        signal.signal(signal.SIGTERM, _end)
        os.write(1, READY)
        if os.read(0, 1) == STAY:
            _close_streams()
            while True:
                signal.pause()
    except _Ended:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    remove(tag, groups, Records())


def _close_streams() -> None:
    """Close the streams of the command that brought the lab up, which may wait for their end."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


if __name__ == "__main__":
    main()
