"""A fault: what a user sees of an exception, a sentence or a traceback; and near names."""

import difflib
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from synchromesh.values.extras import remedy

PACKAGE = str(Path(__file__).parents[1]) + os.sep
LAUNCHING = (str(Path(__file__).parents[1] / "launcher" / "rank.py"), "<frozen runpy>")
# What gloo says where another rank does not answer: its source line, then the reason.
UNANSWERED = re.compile(r"\[\S*gloo/transport/\S+\] ([^.\[]*)")
LOST = re.compile(r"connection with rank \d+ lost: |\[\S*gloo/transport/")  # of either channel
PARTED = re.compile(r"connection with rank (\d+) lost: |\[([^\]\s/]+)\]:\d+")  # with whom
GONE = "lost the connection to another rank, which failed, was killed or had ended before"
TIMED_OUT = "waited in vain for another rank, which hangs or is in another call"


class Refuted(Exception):
    """The answer of a command that ran well is no, for the reason in the message: exit code 1."""


class Stopped(Exception):
    """A run has ended in good order because a signal asked one of its ranks to."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by {Signals(signal).name}")
        self.signal = Signals(signal)

    @property
    def code(self) -> int:
        """Exit code, as a shell has it for a process that the signal ended."""
        return 128 + self.signal


@dataclass(frozen=True)
class Fault:
    """`sentence` is complete for a user's bad input; `traceback` says where the rest arose."""

    sentence: str
    traceback: str  # "" where the sentence is all a user needs
    code: int = 1  # exit code: 2 for bad input, 1 for everything else
    lost: bool = False  # whether another rank did not answer: what went wrong, went wrong there

    def __str__(self) -> str:
        return self.traceback or f"synchromesh: {self.sentence}"

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """What a user should see of `error`, and the exit code it gives."""
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            names = [str(n) for n in (error.filename, error.filename2) if n is not None]
            return cls(printable(f"{error.strerror}: {' and '.join(names)}"), "", 2)
        if isinstance(error, (ValueError, TimeoutError)) and _ours(error):
            return cls(printable(message(error)), "", 2)
        if isinstance(error, Refuted):
            return cls(printable(message(error)), "", 1)
        if isinstance(error, ModuleNotFoundError) and (told := remedy(error.name or "")):
            return cls(told, "", 2)
        trace = _traced(error)
        if isinstance(error, RuntimeError) and (gone := UNANSWERED.match(message(error))):
            reason = gone[1].strip()
            what = TIMED_OUT if reason.startswith("Timed out") else GONE
            return cls(f"{what} ({printable(reason)})", trace, lost=True)
        return cls(printable(cause(error)), trace, lost=bool(LOST.match(message(error))))


def _traced(error: BaseException) -> str:
    """Its traceback without the lines that launch a rank."""
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename in LAUNCHING:
        start = start.tb_next
    lines = traceback.format_exception(type(error), error, start)
    return printable("".join(lines).rstrip(), lines=True)


def cause(error: BaseException) -> str:
    """In one line its class, the first line of its words, and those of what it was raised from."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    lines = (line.strip() for line in message(error).splitlines())
    words = next(filter(None, lines), "the memory has run out" * isinstance(error, MemoryError))
    name = type(error).__name__
    told = f"{name}: {words}" if words else name
    return told if first is error else f"{told}; caused by {cause(first)}"


def message(error: BaseException) -> str:
    """The words of `error`, whose class may be a user's: their own `__str__` can fail."""
    try:
        return str(error)
    except Exception as own:
        return f"its __str__ raises {type(own).__name__}"


def _ours(error: BaseException) -> bool:
    """Whether it is of a class or a line of this package, where messages for users are made."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE)
    return ours or type(error).__module__.startswith("synchromesh.")


def printable(text: str, lines: bool = False) -> str:
    """Control characters are escaped, but for tabs, and newlines where the text has `lines`."""
    kept = "\n\t" if lines else "\t"
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def near(text: str, known: Iterable[str], brackets: bool = False) -> str:
    """`; did you mean 'x' or 'y'` where known names resemble `text`, else nothing. In `brackets`
    it reads ` (did you mean x or y?)`, for sentences that go on after it."""
    if brackets:
        names = difflib.get_close_matches(text, list(known), n=2, cutoff=0.6)
        return f" (did you mean {' or '.join(names)}?)" if names else ""
    names = difflib.get_close_matches(text, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, names))}" if names else ""
