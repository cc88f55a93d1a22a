"""How the bundled workloads train: optimizers, learning-rate schedules, losses and metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from synchromesh.workloads.workload import Parameters


def adamw(rate: float, decay: float = 0.01) -> Callable[[Parameters], torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, lr=rate, weight_decay=decay)


def momentum(rate: float, decay: float = 5e-4) -> Callable[[Parameters], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=decay)


def warm_up(updates: int, decay: int = 0) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Rises for `updates` updates; then stays, or falls to a fiftieth by update `decay`."""

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / updates)
        return rise * max(0.02, 1 - step / decay) if decay else rise

    return partial(LambdaLR, lr_lambda=factor)


@dataclass(frozen=True)
class IgnoredLabels:
    """Labels that no loss and no metric counts."""

    pixel: int = 255  # of crowd regions and of what is outside of an image
    token: int = -100  # of padding


IGNORED = IgnoredLabels()


def logits_of(output: Any) -> Tensor:
    """The scores that a plain module gives, or one from `transformers`."""
    return output if isinstance(output, Tensor) else output.logits


def right_rows(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """How many rows have their best score at their label."""
    return {"accuracy": (logits.argmax(-1) == labels).to(torch.float32).sum()}


def summed_loss(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over labels not `ignored`, and their number. Classes are dim 1."""
    total = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
    return total, (labels != ignored).sum()
