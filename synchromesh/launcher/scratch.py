"""A scratch folder: a launcher's own in the system's temporary one, gone when the launcher is.

    synchromesh-ab12cd/owner     locked as long as its launcher lives, however it ends

A launcher that is killed cannot remove its folder; the next one does. A lock, unlike a process id,
is not reused and is right across containers that share the folder."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "synchromesh-"
OWNER = "owner"


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for this process, removed at the end, with those that others have left."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / "locking", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / "locking", folder / OWNER)  # from now on others see it, locked
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, no folder of a launcher, or gone by now
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
