"""The progress of a run on standard error: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from synchromesh.cli.console import Console
from synchromesh.values.fault import printable

LINE_SECONDS = 10.0  # between plain lines within an epoch
QUIET_SECONDS = 2.0  # in which nothing is said of what goes on


@contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Shows, from the second second on, what a command that calls what it yields is doing; on
    terminals."""
    console = Console(stderr=True)
    line = console.status("")
    timer = Timer(QUIET_SECONDS, line.start if console.is_terminal else str)
    timer.start()
    try:
        yield lambda text: line.update(Text(printable(text)))
    finally:
        timer.cancel()
        timer.join()
        line.stop()


class Display:
    """Shows nothing on ranks other than 0."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.console = Console(stderr=True, highlight=False)
        self.live = shown and self.console.is_terminal
        self._bar: Progress | None = None
        self._task: Any = None
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.shown and self.live:
            self.console.print(Text(printable(text)), soft_wrap=True)
        elif self.shown:
            print(printable(text), file=sys.stderr, flush=True)

    def table(self, table: Table) -> None:
        if self.shown:
            self.console.print(table)

    def start_epoch(self, title: str, done: int, steps: int | None) -> None:
        """A new bar of `steps` (None: not known), of which `done` are done."""
        if self.live:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(title, total=steps, completed=done, loss="-")
            self._bar.start()
        self._title, self._last = title, time.monotonic()
        self._of = "" if steps is None else f"/{steps}"

    def step(self, done: int, loss: float | None) -> None:
        """`loss` is known at some steps only: to read it waits for the device."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            if loss is not None:
                self._bar.update(self._task, loss=f"{loss:.4f}")
        elif self.shown and loss is not None and time.monotonic() - self._last >= LINE_SECONDS:
            self.say(f"{self._title}  step {done}{self._of}  loss {loss:.4f}")
            self._last = time.monotonic()

    def end_epoch(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def summary(title: str, rows: dict[str, str]) -> None:
    """The table at the end, on standard output."""
    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(Text(printable(name)), Text(printable(value)))
    Console(highlight=False).print(table)
