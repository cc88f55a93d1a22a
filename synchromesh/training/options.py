"""Options: what a user may choose besides the plan."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from synchromesh.trace.capture.carry import Start

Loss = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Options:
    """What a user may choose besides the plan; see `prepare`."""

    seed: int = 0
    sync_batch_norm: bool = False
    autocast: torch.dtype | None = None
    weights: Path | None = None  # a checkpoint, or safetensors, to begin with
    carry: Start | None = None  # at the beginning of streams
    headroom: str | None = None  # of each device; None: `planner.problem.Headroom`
    say: Callable[[str], None] = lambda _: None  # receives a sentence about each measurement
