"""The clock that programs are timed with, and when enough has been timed."""

import time
from collections.abc import Callable, Sequence
from math import sqrt
from statistics import fmean, variance

import torch


def clock(device: torch.device) -> Callable[[], float] | None:
    """The processor's clock, where one thread computes, without what others take; else None."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time
    return None


def synchronised(device: torch.device) -> Callable[[], float]:
    """Reads that clock, or the wall's, once the device has done all that was begun."""
    read = clock(device) or time.perf_counter

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return read()

    return now


def mean_and_error(ranks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of the ranks' means, and its standard error by what each rank's samples vary."""
    variances = (variance(samples) / len(samples) for samples in ranks)
    return fmean(map(fmean, ranks)), sqrt(sum(variances)) / len(ranks)


def settled(ranks: Sequence[Sequence[float]], share: float = 0.2) -> bool:
    """Whether the standard error is at most so much of the mean (chosen, not measured)."""
    mean, error = mean_and_error(ranks)
    return error <= share * abs(mean)
