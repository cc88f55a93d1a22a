"""Optimizers and learning-rate schedules of the bundled workloads."""

from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from synchromesh.workloads.workload import Parameters


def adamw(rate: float, decay: float = 0.01) -> Callable[[Parameters], torch.optim.Optimizer]:
    """A function that builds AdamW for parameters."""
    return partial(torch.optim.AdamW, lr=rate, weight_decay=decay)


def momentum(rate: float, decay: float = 5e-4) -> Callable[[Parameters], torch.optim.Optimizer]:
    """A function that builds SGD with momentum 0.9 for parameters."""
    return partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=decay)


def warm_up(updates: int, decay: int = 0) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """The learning rate rises for `updates` updates; then stays, or falls to a fiftieth.

    decay: updates from the start to the end of the fall."""

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / updates)
        return rise * max(0.02, 1 - step / decay) if decay else rise

    return partial(LambdaLR, lr_lambda=factor)
