"""A study's results, the document `results.json`: its runs, and how they were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.results.run import RunResult
from synchromesh.values import document, fields

FORMAT = 1


@dataclass(frozen=True)
class StudyMachine:
    """The machine that the study ran on; of several, the one of rank 0."""

    processor: str = ""
    cores: int = 0
    memory_bytes: int = 0
    devices: tuple[str, ...] = ()  # accelerators
    system: str = ""


@dataclass(frozen=True)
class StudySettings:
    """What was asked for: every combination was run. at_most: seconds of a run's timed steps.
    allow: what `auto` may choose that one device would not compute."""

    strategies: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    scaling: Literal["strong", "weak"] = "strong"
    epochs: int | None = None
    steps: int | None = None
    targets: tuple[str, ...] = ()
    at_most: float | None = None
    allow: str = ""


@dataclass(frozen=True)
class StudyResults(document.Document):
    """All of a study.

    title      the workload, or what the user calls it
    created    date and time, ISO 8601
    command    that repeats it
    cluster    the document of the cluster (of a lab: of its hosts); None for local processes
    emulated   whether hosts were emulated on one machine; never left out of a report
    versions   of synchromesh, torch, Python ...
    note       the user's own words"""

    most_bytes: ClassVar[int] = 100_000_000  # hundreds of runs with the timeline of a step each

    title: str
    created: str
    command: str
    machine: StudyMachine
    runs: tuple[RunResult, ...]
    settings: StudySettings = field(default_factory=StudySettings)
    cluster: Mapping[str, Any] | None = None
    emulated: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    price: HourlyPrice | None = None
    note: str = ""
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = fields.to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, value: Any, name: str) -> "StudyResults":
        """The inverse of `to_dict`. ValueError begins with `name` and the key at fault."""
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"{name}: is of format {value['format']!r}, this version reads {FORMAT}: run the "
                "study anew, or read it with the version that wrote it"
            )
        return fields.of_plain(cls, value, name)
