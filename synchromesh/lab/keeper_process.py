"""A keeper's process as the owner of the lab has it: started, made independent, awaited."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from synchromesh.lab.tag import Tag

READY, STAY = b"r", b"s"  # what the keeper writes once it watches; what makes it independent


class KeeperProcess:
    """A child that removes the lab when its standard input ends (keeper.py)."""

    def __init__(self) -> None:
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "synchromesh.lab.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C at the terminal is not for the keeper
        )
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
