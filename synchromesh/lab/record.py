"""Records of the labs that are up: a file each in a private folder, written when all is built.

A tag is the name of one lab's namespaces and control groups, which says whose they are:

    smlab-1234-567890-switch      of the lab whose keeper is process 1234, started at tick 567890
    smlab-1234-567890-0           its host 0

A process id alone may be in use again; with the start time it names a process for good."""

import fcntl
import json
import os
import re
import select
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synchromesh.lab.description import Description
from synchromesh.launcher.rank import SHORTAGE
from synchromesh.values import document, fields

FOLDER = Path("/run/synchromesh/lab")  # not $XDG_RUNTIME_DIR: sudo and root's own shell differ
CLUSTER = "SYNCHROMESH_LAB"  # names the file of the lab's cluster to what runs on its hosts
TAG = re.compile(r"smlab-([0-9]+)-([0-9]+)")
PART = re.compile(rf"{TAG.pattern}-(switch|[0-9]+)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,60}")


@dataclass(frozen=True, order=True)
class Tag:
    """A keeper's process id and the clock ticks from boot to its start."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"smlab-{self.pid}-{self.start}"

    def part(self, what: int | str) -> str:
        return f"{self}-{what}"

    @classmethod
    def of(cls, pid: int) -> "Tag | None":
        """The tag of a process; None where it runs no more (a zombie does not)."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        words = stat.rpartition(")")[2].split()  # from the third field, the state, on
        return None if words[0] in "ZX" else cls(pid, int(words[19]))

    @classmethod
    def from_plain(cls, value: Any, path: str) -> "Tag":
        """The tag that a text like `smlab-1234-567890` names."""
        match = TAG.fullmatch(document.text(value, path))
        if match is None:
            raise ValueError(f"{path}: {value!r} is not a tag such as smlab-1234-567890")
        return cls(int(match[1]), int(match[2]))

    def to_plain(self) -> str:
        return str(self)

    @classmethod
    def in_name(cls, name: str) -> "Tag | None":
        """The tag that the name of a part starts with; None where it is no part of a lab."""
        match = PART.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

    @property
    def alive(self) -> bool:
        return Tag.of(self.pid) == self

    def end(self, seconds: float) -> None:
        """SIGTERM to the process, and wait for its end; TimeoutError after `seconds`."""
        with suppress(ProcessLookupError):
            process = os.pidfd_open(self.pid)  # from here on the id cannot become another's
            try:
                if self.alive:
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    ended, _, _ = select.select([process], [], [], seconds)
                    if not ended:
                        raise TimeoutError(
                            f"the lab's keeper, process {self.pid}, does not end ({seconds:g} s): "
                            f"kill it (kill -9 {self.pid}) and repeat the command"
                        )
            finally:
                os.close(process)


@dataclass(frozen=True)
class Record:
    """A lab's name, its keeper, the day (2026-01-31), and what it was brought up as."""

    name: str
    tag: Tag
    date: str
    lab: Description


class Records:
    """The folder of records. Whoever builds, changes or finds labs takes its lock."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process builds, changes or finds labs."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError(f"{self.folder} is not a folder of user id {os.geteuid()}: remove it")
        self.folder.chmod(0o700)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel when this process dies
            yield

    def all(self) -> list[Record]:
        """Every record, also of labs whose keeper is no more."""
        records = []
        for name in self._names():
            try:
                records.append(self.read(name))
            except ValueError:
                if self.has(name):  # else the lab was taken down since it was listed
                    raise
        return records

    def read(self, name: str) -> Record:
        """The record of this name. ValueError where it is damaged."""
        path = self._path(name)
        return fields.of_plain(Record, document.read(path), str(path))

    def has(self, name: str) -> bool:
        return self._path(name).exists()

    def write(self, record: Record) -> None:
        document.write(self._path(record.name), json.dumps(fields.to_plain(record), indent=2))

    def cluster(self, name: str) -> Path:
        """Where the description of the lab as a cluster is, for what runs in it."""
        return self.folder / f"{name}.cluster.json"

    def shortage(self, name: str) -> Path:
        """Where what runs in the lab says beforehand that it lacks memory."""
        return self.folder / f"{name}.shortage"

    def variables(self, name: str) -> dict[str, str]:
        return {CLUSTER: str(self.cluster(name)), SHORTAGE: str(self.shortage(name))}

    def write_cluster(self, name: str, text: str) -> None:
        document.write(self.cluster(name), text)

    def forget(self, tag: Tag) -> list[str]:
        """Remove the records of the lab with this tag; their names."""
        names = []
        for name in self._names():
            with suppress(ValueError):  # spoilt: no reason to leave a lab where it is
                names += [name] if self.read(name).tag == tag else []
        for name in names:
            self._path(name).unlink(missing_ok=True)
            self.cluster(name).unlink(missing_ok=True)
            self.shortage(name).unlink(missing_ok=True)
        return names

    def _names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.json") if "." not in path.stem)

    def _path(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a lab: use letters, digits, - and _, at most 61"
            )
        return self.folder / f"{name}.json"
