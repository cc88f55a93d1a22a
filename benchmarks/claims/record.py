"""What is known of each row, and the file of all, benchmarks/claims.json."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.claims.claim import Value

FILE = Path(__file__).parents[1] / "claims.json"


@dataclass(frozen=True)
class Record:
    """The last measurement of one row.

    values      its figures; none where it has failed, or was never measured
    words       what stands in its text besides them
    points      cases that the picture draws
    failed      why there are no figures
    unmeasured  why it was not measured again when the others were
    source      where figures come from that no run of this command has obtained
    busy        cores that other programs kept busy just before
    """

    values: tuple[Value, ...] = ()
    words: Mapping[str, str | float] = field(default_factory=dict)
    points: Any = None
    failed: str = ""
    unmeasured: str = ""
    source: str = ""
    command: str = ""
    commit: str = ""
    date: str = ""
    machine: str = ""
    busy: float = 0.0
    seconds: float = 0.0

    def holds(self, command: str, commit: str) -> bool:
        """Whether it has figures that this command has given at this commit."""
        made = (self.command, self.commit, self.source) == (command, commit, "")
        return made and bool(self.values) and not self.unmeasured

    @property
    def reached(self) -> bool:
        """Whether every figure reaches its goal."""
        return bool(self.values) and all(value.reached for value in self.values)

    def skipped(self, reason: str) -> "Record":
        return replace(self, unmeasured=reason)

    def to_dict(self) -> dict[str, Any]:
        """What is empty is left out."""
        return {
            name: value for name, value in asdict(self).items() if value not in ("", None, {}, ())
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Record":
        values = []
        for value in given.get("values", ()):
            spread = value["spread"]
            values.append(Value(**{**value, "spread": tuple(spread) if spread else None}))
        return cls(**{**given, "values": tuple(values)})


Records = dict[str, Record]


def load(path: Path = FILE) -> Records:
    """The records of the file, by the names of rows; none where there is no file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())
    return {name: Record.from_dict(row) for name, row in rows.items()}


def save(records: Records, path: Path = FILE) -> None:
    """Writes the file anew, without rows of which nothing is known, and at once: whoever is killed
    meanwhile leaves the one before."""
    known = {name: record for name, record in records.items() if record != Record()}
    rows = {name: record.to_dict() for name, record in known.items()}
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(rows, indent=1) + "\n")
    os.replace(fresh, path)


@contextmanager
def alone(path: Path = FILE) -> Iterator[bool]:
    """Whether no other process measures into this file; none can while this one is inside."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(folder)
