"""Runs a command and ends it when nobody waits for it: `python -m benchmarks.claims.guard SECONDS
PARENT COMMAND...`.

Started in a session of its own, it ends the command with all that runs in its process group: after
so many seconds (exit code 124), on SIGTERM, and when the process PARENT is gone, also by SIGKILL.
Without it ranks would compute on beside the next measurement. Labs have a keeper of their own.
"""

import os
import signal
import subprocess
import sys
import time
from types import FrameType

LATE = 124  # exit code of a command that took too long, as timeout(1) has it
GRACE = 15.0  # seconds between SIGTERM and SIGKILL: launchers and labs end what they started
EVERY = 0.2  # seconds between looks


class _Ended(Exception):
    """SIGTERM has come."""


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended


def end_group(command: "subprocess.Popen[bytes]") -> None:
    """Ends this process group; SIGKILL takes this process along where SIGTERM is not enough."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    try:
        command.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


def main(seconds: float, parent: int, words: list[str]) -> int:
    deadline = time.monotonic() + seconds
    signal.signal(signal.SIGTERM, _end)
    command = subprocess.Popen(words)
    try:
        while os.getppid() == parent and time.monotonic() < deadline:
            try:
                return command.wait(EVERY)
            except subprocess.TimeoutExpired:
                pass
    except _Ended:
        deadline = float("inf")
    end_group(command)
    return LATE if time.monotonic() >= deadline else 1


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
