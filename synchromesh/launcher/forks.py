"""Ranks forked ahead of their command, so that one import of torch serves all of them.

A fork is made before any code of the user's runs: all it has of this process are imports. It
waits for a rank's arguments and environment, then runs `launch.rank`, as a new process would."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from synchromesh.launcher import rank


def safe() -> bool:
    """Whether a copy of this process serves as well as a new one: on Linux, without threads (those
    of OpenBLAS end before a fork), and without an accelerator: no driver survives it."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    import torch

    return not torch.accelerator.is_available()


@contextmanager
def forked(count: int) -> Iterator[list["Fork"]]:
    """So many forks, where that is safe, else none; those that nobody began end with the block."""
    forks: list[Fork] = []
    try:
        if safe():
            sys.stdout.flush()
            sys.stderr.flush()
            for _ in range(count):
                forks.append(Fork([f.pipe for f in forks]))
        yield forks
    finally:
        for fork in forks:
            fork.close()


class Fork:
    """A process that waits for its command; to torch's agent it is what `subprocess.Popen` is.
    others: pipes of earlier forks, which are not this one's to hold open."""

    def __init__(self, others: Sequence[int]) -> None:
        self.returncode: int | None = None
        reading, self.pipe = os.pipe()
        self._begun = False
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            os.close(reading)
            return
        try:
            os.setsid()  # a signal of the terminal is the launcher's, which hands it on
            rank.die_with(parent)
            for pipe in (*others, self.pipe):
                os.close(pipe)
            _wait_and_run(reading)
        except BaseException:  # before it is a rank, whose errors the launcher reports
            traceback.print_exc()
        finally:
            os._exit(1)

    def begin(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Lets it run as a rank with these arguments of `launch.rank` and this environment."""
        self._begun = True
        with suppress(BrokenPipeError), open(self.pipe, "w") as pipe:  # it was killed meanwhile
            json.dump([list(arguments), dict(environment)], pipe)

    def poll(self) -> int | None:
        """Its exit code, -N where signal N ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended. subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.02)  # chosen
        return code

    def close(self) -> None:
        """Ends it where it was not begun."""
        if not self._begun:
            os.close(self.pipe)
            self.wait()


def _wait_and_run(reading: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a command to interrupt
    with open(reading) as pipe:
        text = pipe.read()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not text:
        os._exit(0)
    arguments, environment = json.loads(text)
    os.environ.clear()
    os.environ.update(environment)
    _as_new()
    rank.main(arguments)


def _as_new() -> None:
    """What a new process would have by itself: threads as the environment says, unbuffered output,
    the current folder in front of the path, random numbers of its own."""
    import numpy as np
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    sys.stdout, sys.stderr = sys.__stdout__ or sys.stdout, sys.__stderr__ or sys.stderr
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.path[0] = os.getcwd()
    np.random.seed()
