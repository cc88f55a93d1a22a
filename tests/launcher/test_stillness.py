"""Whether the main thread stands still, seen from another one."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from synchromesh.launcher.stillness import Stillness


class Looking:
    """Looks every 0.05 s, as long as the block lasts."""

    def __init__(self) -> None:
        self.own, self.over = Stillness(), threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.over.wait(0.05):
            self.own.look(0)

    def __enter__(self) -> Stillness:
        self.thread.start()
        return self.own

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()


def test_a_thread_that_sleeps_stands_still() -> None:
    with Looking() as own:
        time.sleep(1.0)
        assert 0.7 < own.still < 1.1 and not own.waits
        assert own.place.startswith("test_stillness.py:")
        time.sleep(0.2)
        assert own.still < 0.3  # at another place


@pytest.mark.parametrize("busy", ["computes", "writes", "child"])
def test_one_that_does_something_does_not(busy: str, tmp_path: Path) -> None:
    endless = [sys.executable, "-c", "while True: pass"]
    child = subprocess.Popen(endless) if busy == "child" else None
    file = (tmp_path / "file").open("wb", buffering=0)

    def writes() -> None:
        for _ in range(100):
            file.write(bytes(4096))
            time.sleep(0.01)

    other = threading.Thread(target=writes)
    if busy == "writes":
        other.start()
    with Looking() as own:
        if busy == "computes":
            sum(range(30_000_000))
        else:
            time.sleep(1.0)
        assert own.still < 0.4
    if child is not None:
        child.kill()
        child.wait()
    if busy == "writes":
        other.join()
    file.close()
