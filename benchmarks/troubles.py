"""What goes wrong inside a rank, of `campaign`, done where a row of its data is read."""

import ctypes
import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from synchromesh.training.trainer import Trainer

TROUBLE = "TROUBLE"  # a file: where it is there, it has one of TROUBLES, to be done once
POISONED = "POISONED"  # steps of which a row is not finite


def flip() -> None:
    """A bit of the mantissa of a parameter."""
    for trainer in trainers():
        weight = next(iter(trainer.model.parameters.values())).data
        weight.view(-1).view(torch.int64)[7] ^= 1 << 40


def memory() -> None:
    """Until the kernel kills this process."""
    kept = list[bytes]()
    while True:
        kept.append(b"x" * 2**26)


TROUBLES: dict[str, Callable[[], Any]] = {
    "nan": lambda: math.nan, "flip": flip, "memory": memory, "hang": lambda: time.sleep(1e6),
    "gil": lambda: ctypes.PyDLL(None).sleep(3600), "abort": os.abort,
}  # fmt: skip


def trainers() -> list[Trainer]:
    return [thing for thing in gc.get_objects() if isinstance(thing, Trainer)]


class Rows(Dataset[Any]):
    LOOK = 64  # rows between two looks at what is poisoned

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows, self._trainers, self._read = rows, list[Trainer](), 0
        self._trouble = Path(os.environ.get(TROUBLE, "none"))
        self._poisoned = {*map(int, os.environ.get(POISONED, "").split())}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = self.rows[index]
        if self._trouble.exists():
            word = self._trouble.read_text()
            self._trouble.unlink()
            x = x * (TROUBLES[word]() or 1.0)
        self._read += 1
        if self._poisoned and self._read % self.LOOK == 0:
            self._trainers = self._trainers or trainers()
            if {trainer.steps + 1 for trainer in self._trainers} & self._poisoned:
                x = x * math.nan
        return x, y
