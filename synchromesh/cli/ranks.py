"""Ranks of a command: whether this process is one already, and how it starts its own."""

import os
import sys
import warnings
from collections.abc import Sequence

from synchromesh.values.fault import PACKAGE, printable


def inside() -> bool:
    """Whether torchrun, Slurm's wrapper or our own launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def first() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def size() -> int:
    """How many ranks there are, of which this process is one."""
    from synchromesh.launch.rendezvous import place  # imports torch

    here = place()
    return 1 if here is None else here.size


def hush() -> None:
    """Only rank 0 writes to standard output, and one warning, in one line, is enough."""
    warnings.formatwarning = _warning
    if inside() and not first():
        warnings.simplefilter("ignore")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    if issubclass(category, UserWarning) and filename.startswith(PACKAGE):
        return f"synchromesh: warning: {printable(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {printable(str(message))}\n"


def start(command: Sequence[str], ranks: int) -> int:
    """Runs `command` on local ranks, reports the first failure, returns the exit code."""
    from synchromesh.launch.launcher import launch  # imports torch

    ending = launch(command, ranks)
    sys.stdout.flush()
    if ending.failure is not None:
        print(ending.failure, file=sys.stderr, flush=True)
    return ending.code


def again(words: Sequence[str], ranks: int) -> int:
    """Runs this very command line on local ranks."""
    return start(["-m", "synchromesh", *words], ranks)
