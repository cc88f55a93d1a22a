"""When enough has been measured: the mean of what was taken is known well enough."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

SHARE = 0.2  # of a mean, that its standard error may be; chosen, not measured


def settled(samples: Sequence[float], share: float = SHARE) -> bool:
    """Whether the standard error of the mean is at most `share` of it."""
    return stdev(samples) / sqrt(len(samples)) <= share * abs(fmean(samples))
