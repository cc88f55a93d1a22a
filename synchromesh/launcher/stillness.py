"""Whether a rank's main thread stands still, or waits for others, seen from another thread."""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

WAITS = ("wait", "finish", "apart")  # of a world


class Stillness:
    """Seconds, as of the last look: still, for which the main thread was at one place outside of
    collectives and the process, with its children, neither computed nor read nor wrote (place says
    where); waits, for which it was in collectives, in one step."""

    BUSY: ClassVar = 0.005  # of the time: a process that computes more is not still; chosen
    DEPTH: ClassVar = 6  # frames in which a collective may be called; a message takes four

    def __init__(self) -> None:
        self.still = self.waits = 0.0
        self.place = ""
        self._since = self._waiting = time.monotonic()
        self._here: Any = None
        self._call: Any = None
        self._cpu = self._looks = 0.0  # seconds of this process, and of looks, which are not its

    def look(self, steps: int) -> None:
        """steps: done so far."""
        began = time.thread_time() - self._looks
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None:
            return
        now, waits = time.monotonic(), in_collective(frame, self.DEPTH)
        if self._call != (waits, steps):
            self._call, self._waiting = (waits, steps), now
        here = id(frame), frame.f_lasti, _traffic()
        cpu = _cpu_seconds() - (time.thread_time() - began)
        busy = cpu - self._cpu > self.BUSY * (1.0 + now - self._since)
        if waits or busy or here != self._here or _on_disk():
            self._here, self._since, self._cpu = here, now, cpu
        self.waits, self.still = now - self._waiting if waits else 0.0, now - self._since
        name = Path(frame.f_code.co_filename).name
        self.place = f"{name}:{frame.f_lineno}, {frame.f_code.co_name}"
        self._looks = time.thread_time() - began


def in_collective(frame: FrameType, depth: int = 1) -> bool:
    """Whether one is called there, or so many frames further out."""
    at: FrameType | None = frame
    for _ in range(depth):
        if at is None:
            return False
        file = at.f_code.co_filename
        own = file.endswith("/synchromesh/engine/world.py") and at.f_code.co_name in WAITS
        if own or "/torch/distributed/" in file or file.endswith("/engine/control_channel.py"):
            return True
        at = at.f_back
    return False


def places(frame: FrameType | None, depth: int) -> str:
    """Where it is, and from where that was called, so many frames."""
    found = list[str]()
    while frame is not None and len(found) < depth:
        found.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return ", ".join(found)


def _cpu_seconds() -> float:
    """Of this process and those that its main thread has started, as loader workers."""
    ticks = 0
    with suppress(OSError, ValueError, IndexError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        ticks = sum(sum(map(int, _stat(f"/proc/{pid}/stat")[11:13])) for pid in children)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _stat(file: str) -> list[str]:
    """Behind the name, which may have spaces."""
    return Path(file).read_text().rpartition(")")[2].split()


def _traffic() -> str:
    """What this process has read and written so far, /proc itself left out."""
    with suppress(OSError):
        return "".join(Path("/proc/self/io").read_text().splitlines(keepends=True)[4:6])
    return ""


def _on_disk() -> bool:
    """Whether the main thread waits for a disk."""
    with suppress(OSError, IndexError):
        return _stat(f"/proc/self/task/{os.getpid()}/stat")[0] == "D"
    return False
