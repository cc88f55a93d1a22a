"""A cell of a study: one strategy on so many devices, one batch size and seed; the grid; the job.

Cells that are measured in turns are a round-robin `group`: all of one batch size and seed, as far
as the machine holds their processes at once."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from synchromesh.results.run import RunResult
from synchromesh.results.study import StudySettings
from synchromesh.values import document, fields
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload

SINGLE = "single"


@dataclass(frozen=True)
class StudyCell:
    """What one run of a study is; workload: its name; batch: rows of a global batch."""

    workload: str
    strategy: str
    devices: int
    batch: int
    seed: int

    @property
    def key(self) -> str:
        """A name for files, of what these can hold: `digits-cnn-data-4x256-seed0`."""
        name = re.sub(r"[^A-Za-z0-9.=_]+", "-", f"{self.workload}-{self.strategy}").strip("-.")
        return f"{name}-{self.devices}x{self.batch}-seed{self.seed}"

    def failed(self, why: str, emulated: bool = False) -> RunResult:
        """A run of it that did not end well."""
        return RunResult(
            self.workload, self.strategy, self.devices, self.batch, self.seed, "failed",
            reason=why, emulated=emulated,
        )  # fmt: skip

    def __str__(self) -> str:
        on = f"{self.strategy} on {self.devices} device{'s' * (self.devices != 1)}"
        return f"{self.workload}: {on}, batch {self.batch}, seed {self.seed}"


@dataclass(frozen=True)
class CellJob:
    """What the ranks of one contestant do, as a file that they read.

    target, data  as on the command line
    plans         that a strategy of ours stands for; none of a rival
    epochs        to train; None: until the study ends it, without validation
    socket        the study's"""

    cell: StudyCell
    target: str
    socket: str
    plans: tuple[str, ...] = ()
    data: str | None = None
    epochs: int | None = None
    bf16: bool = False
    allow: str = ""

    def write(self, path: Path) -> None:
        document.write(path, json.dumps(fields.to_plain(self), indent=2))

    @classmethod
    def load(cls, path: str) -> "CellJob":
        """The job in a file. ValueError where it is none."""
        return fields.of_plain(cls, document.read(path), path)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.bf16 else None

    def workload(self) -> Workload:
        """What it trains, with the cell's batch size; without validation where there is none."""
        workload = replace(load(self.target, self.data), batch_size=self.cell.batch)
        if self.epochs is None:
            workload = replace(workload, valid_data=None)
        workload.check_batch()
        return workload


def grid(workload: str, settings: StudySettings) -> list[StudyCell]:
    """Every combination that is asked for of a workload, each once, in the order of their runs.

    `single` has one device whatever is asked for, and on one device every other strategy of ours
    is `single`. Under weak scaling a batch size is that of one device. ValueError where two plans
    would share a name."""
    cells: dict[StudyCell, None] = {}
    asked = settings.seeds, settings.batch_sizes, sorted(settings.devices), settings.strategies
    for seed, batch, devices, strategy in product(*asked):
        count = 1 if strategy == SINGLE else devices
        if count > 1 or strategy == SINGLE:
            rows = batch * count if settings.scaling == "weak" else batch
            cells[StudyCell(workload, strategy, count, rows, seed)] = None
    require_distinct(list(cells))
    return list(cells)


def require_distinct(cells: Sequence[StudyCell]) -> None:
    """ValueError where two cells, be it of two workloads, would share the name of their files."""
    keys: dict[str, StudyCell] = {}
    for cell in cells:
        other = keys.setdefault(cell.key, cell)
        if other is not cell:
            raise ValueError(
                f"strategies {other.strategy!r} of {other.workload} and {cell.strategy!r} of "
                f"{cell.workload} would share the name {cell.key}: leave one of them out"
            )


def groups(cells: Sequence[StudyCell], asked: StudySettings, most: int) -> list[list[StudyCell]]:
    """The cells of a workload by seed and batch size (weak: of one device), in order; one whose
    processes would be more than `most` is cut into several, between numbers of devices where that
    is possible, so that what is compared with each other stays together."""
    alike: dict[tuple[int, int], list[StudyCell]] = {}
    for cell in cells:
        rows = cell.batch // cell.devices if asked.scaling == "weak" else cell.batch
        alike.setdefault((cell.seed, rows), []).append(cell)
    return [group for together in alike.values() for group in _cut(together, most)]


def _cut(cells: Sequence[StudyCell], most: int) -> list[list[StudyCell]]:
    cut: list[list[StudyCell]] = [[]]
    for devices in dict.fromkeys(c.devices for c in cells):
        same = [c for c in cells if c.devices == devices]
        if cut[-1] and _processes([*cut[-1], *same]) > most:
            cut.append([])
        for cell in same:
            if cut[-1] and _processes([*cut[-1], cell]) > most:
                cut.append([])
            cut[-1].append(cell)
    return cut


def _processes(cells: Sequence[StudyCell]) -> int:
    return sum(cell.devices for cell in cells)
