"""When enough has been measured: the mean of what was taken is known well enough."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance

SHARE = 0.2  # of a mean, that its standard error may be; chosen, not measured


def mean_and_error(ranks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of the ranks' means, and its standard error by what each rank's samples vary."""
    variances = (variance(samples) / len(samples) for samples in ranks)
    return fmean(map(fmean, ranks)), sqrt(sum(variances)) / len(ranks)


def settled(ranks: Sequence[Sequence[float]]) -> bool:
    """Whether the error is at most `SHARE` of the mean."""
    mean, error = mean_and_error(ranks)
    return error <= SHARE * abs(mean)
