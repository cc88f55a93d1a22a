"""The optimizer's step measured: seconds by parameter bytes and by tensors, bytes of its state."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

BYTES = 1 << 22  # of the parameters it is tried on
RUNS = 5


@dataclass(frozen=True)
class Update:
    """seconds = byte * parameter bytes + tensor * tensors; state = factor * parameter bytes."""

    byte: float
    tensor: float
    state_factor: float
    copy_byte: float  # seconds to copy a byte of a gradient into a bucket


def update(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> Update:
    """Of an optimizer of the same class and settings on parameters of its own.

    Two mixtures of the same bytes, few large and many small tensors, tell the two prices apart.
    """
    numbers = BYTES // dtype.itemsize
    few, many = (2, numbers // 2), (128, numbers // 128)
    (seconds_few, factor), (seconds_many, _) = (
        _step(optimizer, device, dtype, *mix) for mix in (few, many)
    )
    tensor = max(0.0, (seconds_many - seconds_few) / (many[0] - few[0]))
    byte = max(0.0, (seconds_few - tensor * few[0]) / BYTES)
    return Update(byte, tensor, factor, _copy(device, dtype))


def _copy(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds a byte, between tensors too large for the caches of one core."""
    source = torch.ones(BYTES // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    taken = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:]) / BYTES


def _step(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype, tensors: int, numbers: int
) -> tuple[float, float]:
    parameters = [
        nn.Parameter(torch.ones(numbers, device=device, dtype=dtype)) for _ in range(tensors)
    ]
    twin = twin_of(optimizer, parameters)
    taken = []
    for _ in range(RUNS + 1):
        for p in parameters:
            p.grad = torch.full_like(p, 1e-3)
        began = time.perf_counter()
        twin.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    state = [x for s in twin.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    held = sum(x.numel() * x.element_size() for x in state)
    return median(taken[1:]), held / sum(p.numel() * p.element_size() for p in parameters)


def twin_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Any:
    """An optimizer of the same class over `parameters`, with the settings of the first group."""
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(optimizer.__dict__)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    twin.param_groups = [{**settings, "params": list(parameters)}]
    twin.state = type(optimizer.state)(optimizer.state.default_factory)
    return twin
