"""A job: what the ranks of one contestant do, as a file that they read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from synchromesh.study.cell import StudyCell
from synchromesh.values import document, fields
from synchromesh.workloads.target import load
from synchromesh.workloads.workload import Workload


@dataclass(frozen=True)
class CellJob:
    """One cell, and where its study is reached.

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

    def write(self, path: Path) -> None:
        document.write(path, json.dumps(fields.to_plain(self), indent=2))

    @classmethod
    def load(cls, path: str) -> "CellJob":
        """The job in a file. ValueError where it is none."""
        return fields.of_plain(cls, document.read(path), path)

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of autocast, where there is one."""
        return torch.bfloat16 if self.bf16 else None

    def workload(self) -> Workload:
        """What it trains, with the cell's batch size; without validation where there is none."""
        workload = replace(load(self.target, self.data), batch_size=self.cell.batch)
        if self.epochs is None:
            workload = replace(workload, valid_data=None)
        workload.check_batch()
        return workload
