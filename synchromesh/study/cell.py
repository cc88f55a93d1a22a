"""A cell of a study: one strategy on so many devices, one batch size and one seed; and the grid.

Cells that are measured in turns are a round-robin `group`: all of one batch size and seed, as far
as the machine holds their processes at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from synchromesh.results.study import Settings

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
        named = f"{self.workload}-{self.strategy}"
        name = re.sub(r"[^A-Za-z0-9.=_]+", "-", named).strip("-.")
        return f"{name}-{self.devices}x{self.batch}-seed{self.seed}"

    def __str__(self) -> str:
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return (
            f"{self.workload}: {self.strategy} on {devices}, batch {self.batch}, seed {self.seed}"
        )


def grid(workload: str, settings: Settings) -> list[StudyCell]:
    """Every combination that is asked for of a workload, each once, in the order of their runs.

    `single` has one device whatever is asked for, and on one device every other strategy of ours
    is `single`. Under weak scaling a batch size is that of one device. ValueError where two plans
    would share a name."""
    found: dict[StudyCell, None] = {}
    for seed in settings.seeds:
        for batch in settings.batch_sizes:
            for devices in sorted(settings.devices):
                for strategy in settings.strategies:
                    count = 1 if strategy == SINGLE else devices
                    if count == 1 and strategy != SINGLE:
                        continue
                    rows = batch * count if settings.scaling == "weak" else batch
                    found[StudyCell(workload, strategy, count, rows, seed)] = None
    require_distinct(list(found))
    return list(found)


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


def groups(cells: Sequence[StudyCell], settings: Settings, most: int) -> list[list[StudyCell]]:
    """The cells of a workload by seed and batch size (weak: of one device), in order; one whose
    processes would be more than `most` is cut into several, between numbers of devices where that
    is possible, so that what is compared with each other stays together."""
    weak = settings.scaling == "weak"
    alike: dict[tuple[int, int], list[StudyCell]] = {}
    for cell in cells:
        rows = cell.batch // cell.devices if weak else cell.batch
        alike.setdefault((cell.seed, rows), []).append(cell)
    found: list[list[StudyCell]] = []
    for together in alike.values():
        group: list[StudyCell] = []
        for devices in dict.fromkeys(c.devices for c in together):
            same = [c for c in together if c.devices == devices]
            if group and _processes([*group, *same]) > most:
                found.append(group)
                group = []
            for cell in same:
                if group and _processes([*group, cell]) > most:
                    found.append(group)
                    group = []
                group.append(cell)
        found.append(group)
    return found


def _processes(cells: Sequence[StudyCell]) -> int:
    return sum(cell.devices for cell in cells)
