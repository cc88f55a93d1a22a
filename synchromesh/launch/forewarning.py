"""The forewarning: what ranks say of their plan's memory before the kernel may end them for it.

A process that the kernel kills has no last words. So a rank whose plan is predicted not to fit
writes why into the file that `SYNCHROMESH_FOREWARNING` names, and whoever has started the ranks
says it together with the kill."""

import os
from contextlib import suppress
from pathlib import Path

FILE = "SYNCHROMESH_FOREWARNING"  # names the file; set by launchers


def forewarn(clause: str) -> None:
    """Leaves a clause for the launcher, in place of an earlier one; empty where all is well."""
    if path := os.environ.get(FILE):
        with suppress(OSError):  # the launcher is gone, or has left its folder
            Path(path).write_text(clause)


def forewarning(path: Path) -> str:
    """The clause that ranks have left, empty where they left none."""
    try:
        return path.read_text()
    except OSError:
        return ""
