"""The models of `models.py` as TARGETs of the command: `synchromesh verify tests/targets.py:bert
--plan tensor`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset

from synchromesh.workloads.workload import Workload
from tests.models import FAMILIES, UNEVEN, Family
from tests.rounding_models import ROUNDING

SAMPLES = 30
MODELS = FAMILIES | UNEVEN | ROUNDING


class Rows(Dataset[Any]):
    """The rows of one batch, a dictionary or a tuple of tensors, as samples."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        parts = self.batch.values() if isinstance(self.batch, dict) else self.batch
        return len(next(iter(parts)))

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.batch, dict):
            return {key: value[index] for key, value in self.batch.items()}
        return tuple(value[index] for value in self.batch)


def target(family: str, seed: int = 0) -> Workload:
    """A model as a workload; seed: of weights and rows."""
    return workload(family, lambda: MODELS[family](seed), seed)


def workload(name: str, build: Callable[[], Family], seed: int = 0) -> Workload:
    """A workload of 30 random rows in global batches of 12; seed: of the rows."""

    def model() -> torch.nn.Module:
        return build()[0]

    _, loss, make = build()
    return Workload(
        model=model,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=Rows(make(SAMPLES, seed=7 + seed)),
        batch_size=12,
        name=name,
    )


def __getattr__(name: str) -> Any:
    if name in MODELS:
        return lambda: target(name)
    raise AttributeError(name)
