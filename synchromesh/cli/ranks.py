"""Ranks of a command: whether this process is one already, and how it starts its own."""

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from synchromesh.launcher.generation import SOCKET
from synchromesh.launcher.rank import fall_silent
from synchromesh.values.fault import PACKAGE, printable

if TYPE_CHECKING:
    from synchromesh.launcher.forks import Fork
    from synchromesh.launcher.launcher import Ending

EXPORT = "torch.export._trace"  # torch imports it with the first export: half of what torch takes


def inside() -> bool:
    """Whether torchrun, Slurm's wrapper or our own launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def forget() -> None:
    """This process is no rank, whatever has started it."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(variable, None)


def refuse_inside(command: str, what: str) -> None:
    """ValueError where this process is a rank already; `what` the command starts on its ranks."""
    if inside():
        raise ValueError(
            f"`{command}` starts ranks and this process is one already (RANK is set): start "
            f"{what} itself"
        )


def first() -> bool:
    """Whether this process speaks for all: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def size() -> int:
    """How many ranks there are, of which this process is one."""
    from synchromesh.launcher.rendezvous import place  # imports torch

    if SOCKET in os.environ:  # whose launcher serves no port
        return int(os.environ["WORLD_SIZE"])
    here = place()
    return 1 if here is None else here.size


def hush() -> None:
    """Only rank 0 writes to standard output, and one warning, in one line, is enough."""
    warnings.formatwarning = _warning
    if inside() and not first():
        warnings.simplefilter("ignore")
        fall_silent()


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    line: str | None = None,
) -> str:  # fmt: skip
    if issubclass(category, UserWarning) and filename.startswith(PACKAGE):
        return f"synchromesh: warning: {printable(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {printable(str(message))}\n"


@contextmanager
def forked(count: int, *modules: str) -> Iterator[list["Fork"]]:
    """Ranks that have these modules imported and wait for their command, where that is safe."""
    with uncollected():
        for module in modules:
            importlib.import_module(module)
        with suppress(ModuleNotFoundError):  # torch may call its own otherwise one day
            importlib.import_module(EXPORT)
        from synchromesh.launcher import forks
    gc.freeze()  # what is imported stays: later collections leave it out, and forks share it
    with forks.forked(count) as waiting:
        yield waiting


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles, a fifth of imports, a seventh of commands that end soon."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def start(command: Sequence[str], ranks: int, forks: Sequence["Fork"] = ()) -> int:
    """Runs `command` on local ranks, reports the first failure, returns the exit code."""
    from synchromesh.launcher.launcher import launch  # imports torch

    return ended(launch(command, ranks, forks=forks))


def again(words: Sequence[str], ranks: int, forks: Sequence["Fork"] = ()) -> int:
    return start(["-m", "synchromesh", *words], ranks, forks)


def ended(ending: "Ending") -> int:
    """Reports a failure; the exit code."""
    sys.stdout.flush()
    if ending.failure is not None:
        print(ending.failure, file=sys.stderr, flush=True)
    return ending.code
