"""The console: tables, texts and progress, on a terminal, a file or a pipe that may be closed."""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from synchromesh.values.fault import printable

if TYPE_CHECKING:
    from synchromesh.engine.noise_averages import NoiseScale


class Console(RichConsole):
    """Rich's, without its exit code 1 where the reader, `head` for one, has seen enough."""

    @classmethod
    def wide(cls, columns: int) -> "Console":
        """One of standard output, of so many columns where that is no terminal."""
        made = cls(highlight=False)
        return made if made.is_terminal else cls(highlight=False, width=columns)

    def on_broken_pipe(self) -> None:
        """The command goes on, and what it still writes there is lost."""
        self.quiet = True
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.file.fileno())
        os.close(null)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()
) -> Table:
    """A table of texts: numbers to the right, columns of `left`, else the first, to the left."""
    made = Table(title=Text(printable(title)), title_justify="left")
    for name in columns:
        to_left = name in (left or columns[:1])
        made.add_column(Text(printable(name)), justify="left" if to_left else "right")
    for cells in rows:
        made.add_row(*(Text(printable(cell)) for cell in cells))
    return made


def shown(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)


@contextmanager
def working(quiet: float = 2.0) -> Iterator[Callable[[str], None]]:
    """Shows, on terminals, after so many seconds, what its caller says that it is doing."""
    console = Console(stderr=True)
    line = console.status("")
    timer = Timer(quiet, line.start if console.is_terminal else str)
    timer.start()
    try:
        yield lambda text: line.update(Text(printable(text)))
    finally:
        timer.cancel()
        timer.join()
        line.stop()


class Display:
    """The progress of a run on standard error: a live bar on a terminal, elsewhere a line at most
    every `EVERY` seconds of an epoch. Shows nothing on ranks other than 0."""

    EVERY: ClassVar = 10.0

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.console = Console(stderr=True, highlight=False)
        self.live = shown and self.console.is_terminal
        self._bar: Progress | None = None
        self._task: Any = None
        self._last = time.monotonic()

    def take_over(self) -> None:
        """This rank has become rank 0."""
        self.shown, self.live = True, self.console.is_terminal

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

    def resize_epoch(self, steps: int | None) -> None:
        """The epoch that goes on has so many steps, for batches have other rows."""
        if self._bar is not None:
            self._bar.update(self._task, total=steps)
        self._of = "" if steps is None else f"/{steps}"

    def step(self, done: int, loss: float | None) -> None:
        """`loss` is known at some steps only: to read it waits for the device."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            if loss is not None:
                self._bar.update(self._task, loss=f"{loss:.4f}")
        elif self.shown and loss is not None and time.monotonic() - self._last >= self.EVERY:
            self.say(f"{self._title}  step {done}{self._of}  loss {loss:.4f}")
            self._last = time.monotonic()

    def end_epoch(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def summary(title: str, rows: dict[str, str]) -> None:
    """The table at the end, on standard output."""
    columns = ("name", "value")
    made = table(title, columns, rows.items(), left=columns)
    made.show_header = False
    Console(highlight=False).print(made)


def metric(value: float | None) -> str:
    return shown("{:.2%}" if value is None or 0 <= value <= 1 else "{:.4g}", value)


def noise_rows(scale: "NoiseScale | None") -> dict[str, str]:
    """`230 rows (180 to 310)`, with the reason where something is not known, by its name; nothing
    where it was not asked for."""
    if scale is None:
        return {}
    value, low, high = (shown("{:,.0f}", x) for x in (scale.value, scale.low, scale.high))
    interval = "" if scale.low is None else f" ({low} to {high})"
    known = "not known" if scale.value is None else f"{value} rows{interval}"
    return {"noise scale": f"{known}: {scale.reason}" if scale.reason else known}
