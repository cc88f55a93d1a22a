"""A lab's keeper: the process that removes the lab, as it is and as the lab's owner has it.

When the owner closes the pipe to it, or dies in whichever way, the keeper kills what runs in the
hosts and removes them. One byte through the pipe makes it independent of its owner: it then keeps
the lab until SIGTERM (`synchromesh lab down`)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from synchromesh.lab import cgroup, network
from synchromesh.lab.cgroup import Groups
from synchromesh.lab.record import Records, Tag
from synchromesh.lab.requirements import require

READY, STAY = b"r", b"s"  # what the keeper writes once it watches; what makes it independent


class KeeperProcess:
    """A child that removes the lab when its standard input ends."""

    def __init__(self) -> None:
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C at the terminal is not for the keeper
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        tag = Tag.of(self._process.pid)
        if tag is None:
            raise ValueError("the lab's keeper ended before it began: see its message above")
        self.tag = tag

    def await_ready(self) -> None:
        """Return once the keeper watches over the lab; ValueError where it has ended instead."""
        if self._output.read(1) != READY:
            raise ValueError("the lab's keeper cannot start: see its message above")

    def stay(self) -> None:
        """Make the keeper outlive its owner: it then ends by SIGTERM alone."""
        self._input.write(STAY)
        self._input.flush()

    def wait(self, seconds: float) -> None:
        """Wait for the end of a keeper that was told to end; close the pipes to it."""
        self._process.wait(timeout=seconds)
        self._output.close()
        with suppress(BrokenPipeError):
            self._input.close()


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
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
        os.write(1, READY)
        if os.read(0, 1) == STAY:
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    remove(tag, groups, Records())


def remove(tag: Tag, groups: Groups, records: Records) -> list[str]:
    """Remove a lab with all that runs in it; the names it was recorded under.

    Repeated until nothing is found, as the process that was building may not have stopped yet."""

    def of_lab(parts: Iterable[str]) -> list[str]:
        return [name for name in parts if Tag.in_name(name) == tag]

    names = records.forget(tag)
    deadline = time.monotonic() + 30  # seconds; chosen
    while left := of_lab([*network.namespaces(), *groups.names()]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(left)} cannot be removed (30 s)")
        for name in of_lab(groups.names()):
            cgroup.remove(groups, name)
        for name in of_lab(network.namespaces()):
            network.remove(name)
    return names


def remove_stale(groups: Groups, records: Records) -> dict[Tag, list[str]]:
    """Remove the labs whose keeper is no longer alive: their tags, the names by tag."""
    named = [Tag.in_name(name) for name in (*network.namespaces(), *groups.names())]
    tags = {tag for tag in named if tag is not None} | {r.tag for r in records.all()}
    return {tag: remove(tag, groups, records) for tag in sorted(tags) if not tag.alive}


def labs() -> tuple[list[str], list[str]]:
    """Names of the labs that are up, and of those that were not and have been removed now."""
    groups, records = require(), Records()
    with records.locked():
        gone = remove_stale(groups, records)
        removed = [name for tag, names in gone.items() for name in (names or [str(tag)])]
        return [record.name for record in records.all()], removed
