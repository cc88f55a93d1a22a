"""The best epoch: by which number, how long without a better one, and what is kept of others."""

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from synchromesh.checkpoint import manifest
from synchromesh.training.trainer import Trainer
from synchromesh.workloads.workload import Workload

LEAST = (
    "loss",
    "error",
    "perplexity",
    "mae",
    "mse",
    "rmse",
)  # ends of names of which less is better


@dataclass(frozen=True)
class Best:
    """By which of an epoch's numbers it is better than another.

    name: of a metric; `loss`: of training, where no metric is called so; empty: the first one."""

    name: str = ""
    least: bool = False

    @classmethod
    def parse(cls, given: str | None, metric: bool = True) -> "Best":
        """Of `accuracy`, `perplexity`, `reward:max`, `cost:min`, or nothing: of the first metric,
        or of the loss where there is no `metric`. ValueError else."""
        text = given or ("" if metric else "loss")
        name, colon, way = text.partition(":")
        if (text and not name) or (colon and way not in ("min", "max")):
            raise ValueError(f"best={text!r} should be a metric's name, maybe with :min or :max")
        return cls(name, way == "min" if colon else name.lower().endswith(LEAST))

    def require(self, workload: Workload, trainer: Trainer, seed: int) -> None:
        """ValueError for a metric that there is not, found by one batch; all ranks call alike."""
        data, metrics = workload.valid_data, dict[str, float]()
        if self.name not in ("", "loss"):
            if data is not None and workload.metric is not None:
                batch = replace(workload, train_data=data).example(seed=seed)
                metrics = trainer.evaluate([trainer.shard(batch)], workload.metric)
            self.value(None, metrics)

    def value(self, loss: float | None, metrics: Mapping[str, float]) -> float:
        """NaN where there is none. ValueError for a metric that there is not."""
        if not self.name:
            return next(iter(metrics.values()), math.nan)
        if self.name in metrics:
            return metrics[self.name]
        if self.name != "loss":
            known = ", ".join((*metrics, "loss"))
            raise ValueError(f"best={self.name}: there is no such metric; there are {known}")
        return math.nan if loss is None else loss

    def better(self, value: float, than: float | None) -> bool:
        if math.isnan(value) or than is None:
            return not math.isnan(value)
        return value < than if self.least else value > than


def remove_older(folder: Path, keep: int) -> None:
    """Leaves the newest `keep` checkpoints of epochs and steps, and the best one."""
    named = re.compile(r"(epoch|step)-\d+")
    for path in [p for p in manifest.by_age(folder) if named.fullmatch(p.name)][keep:]:
        shutil.rmtree(path, ignore_errors=True)
