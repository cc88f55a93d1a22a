"""The optimizer's step measured: seconds by parameter bytes and by tensors, bytes of its state."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.programs.clock import synchronised
from synchromesh.programs.memory import LiveBytes
from synchromesh.values.optimizer import trial_gradient, twin_of


@dataclass(frozen=True)
class StateTrial:
    """What an optimizer is tried on. Chosen, not measured."""

    bytes: int = 1 << 22  # of parameters
    runs: int = 5  # whose median counts
    few: int = 4096  # numbers of a parameter that shows what state there is


TRIAL = StateTrial()


@dataclass(frozen=True)
class OptimizerCost:
    """What a step takes of an optimizer, in seconds: where measured, of this rank's clock.

    seconds = once + byte * bytes + tensor * tensors; state bytes = state_factor * bytes;
    bytes alive besides in the step = work_largest * largest tensor + work_byte * bytes."""

    once: float
    byte: float
    tensor: float
    copy_byte: float  # seconds to copy a byte of a gradient into a bucket
    state_factor: float
    work_largest: float = 0.0
    work_byte: float = 0.0


def update(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> OptimizerCost:
    """Of an optimizer of the same class and settings: tensors of hardly any bytes tell a step and
    a tensor apart, a large one tells bytes, many small ones the bytes at work."""
    numbers = TRIAL.bytes // dtype.itemsize
    few, many = (1, numbers), (128, numbers // 128)
    one, other = (_step(optimizer, device, dtype, *mix) for mix in (few, many))
    least, several = (_step(optimizer, device, dtype, n, 64).seconds for n in (1, 17))
    tensor = max(0.0, (several - least) / 16)
    once = max(0.0, least - tensor)
    byte = max(0.0, (one.seconds - least) / TRIAL.bytes)
    largest = max(0.0, (one.work - other.work) / (TRIAL.bytes / few[0] - TRIAL.bytes / many[0]))
    work = max(0.0, (other.work - largest * TRIAL.bytes / many[0]) / TRIAL.bytes)
    return OptimizerCost(once, byte, tensor, _copy(device, dtype), one.state_factor, largest, work)


def state_factor(optimizer: Optimizer, device: torch.device, dtype: torch.dtype) -> float:
    """Bytes of state for a byte of a parameter, of an optimizer of the same class and settings."""
    parameter = nn.Parameter(torch.ones(TRIAL.few, device=device, dtype=dtype))
    parameter.grad = trial_gradient(optimizer, parameter)
    twin = twin_of(optimizer, [parameter])
    twin.step()
    return sum(x.nbytes for x in states_of(twin)) / parameter.nbytes


def states_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of its state."""
    every = (x for state in optimizer.state.values() for x in state.values())
    return [x for x in every if isinstance(x, Tensor)]


def _copy(device: torch.device, dtype: torch.dtype) -> float:
    """Seconds a byte, between tensors too large for the caches of one core."""
    source = torch.ones(TRIAL.bytes // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    return _median(lambda: target.copy_(source), device) / TRIAL.bytes


def _median(
    run: Callable[[], object], device: torch.device, before: Callable[[], None] = lambda: None
) -> float:
    """Median seconds of a run, of a few after a first one; `before` each of them is not timed."""
    now, taken = synchronised(device), []
    for _ in range(TRIAL.runs + 1):
        before()
        began = now()
        run()
        taken.append(now() - began)
    return median(taken[1:])


@dataclass(frozen=True)
class _Step:
    seconds: float
    state_factor: float
    work: int  # bytes alive besides


def _step(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype, tensors: int, numbers: int
) -> _Step:
    one = torch.ones(numbers, device=device, dtype=dtype)
    parameters = [nn.Parameter(one.clone()) for _ in range(tensors)]
    twin = twin_of(optimizer, parameters)

    def fill() -> None:
        for p in parameters:
            p.grad = trial_gradient(optimizer, p)

    seconds = _median(twin.step, device, before=fill)
    state_bytes = sum(x.nbytes for x in states_of(twin))
    fill()
    with LiveBytes() as live:
        twin.step()
    return _Step(seconds, state_bytes / sum(p.nbytes for p in parameters), live.peak)
