"""A job: what `train` was asked to do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from synchromesh.cli.run_folder import Resumed, RunFolder

if TYPE_CHECKING:
    from synchromesh.values.plan import Plan
    from synchromesh.workloads.workload import Workload


@dataclass(frozen=True)
class Job:
    """What `train` was asked to do."""

    workload: "Workload"
    plan: "Plan"
    seed: int
    folder: RunFolder
    epochs: int
    steps: int | None  # instead of epochs
    every: int | None  # steps between checkpoints, besides one an epoch
    resumed: Resumed | None
    bf16: bool
    adapt: bool  # whether the plan may change while training runs
