"""Dominance: which of many labels no other label of the same state undercuts in everything."""

import numpy as np
from numpy.typing import NDArray

from .problem import Floats
from .table import Ints

Bools = NDArray[np.bool_]


def undominated(state: Ints, x: Floats, y: Floats, z: Floats, limited: bool) -> Ints:
    """Indices, ascending, of the labels to keep.

    A label goes when another one of its state is at most as large in x and y, and, if `limited`,
    in z. Of labels equal in these one of least z stays, the first."""
    order = np.lexsort((z, y, x, state))
    if limited:
        kept = ~_dominated(state[order], y[order], z[order])
    else:
        kept = _staircase(state[order], y[order])
    found: Ints = np.sort(order[kept])
    return found


def _ranks(values: Floats) -> Ints:
    """0, 1, 2 ... in ascending order, equal values alike."""
    found: Ints = np.unique(values, return_inverse=True)[1]
    return found


def _staircase(state: Ints, y: Floats) -> Bools:
    """Sorted by (state, x): true where y is below all before it in its state."""
    if not len(y):
        return np.zeros(0, dtype=bool)
    fresh = np.r_[True, state[1:] != state[:-1]]
    # The running minimum starts anew in each state, as later states lie below earlier ones.
    level = _ranks(y) - np.cumsum(fresh) * (len(y) + 1)
    least = np.minimum.accumulate(level)
    kept: Bools = np.r_[True, level[1:] < least[:-1]] | fresh
    return kept


def _dominated(state: Ints, y: Floats, z: Floats) -> Bools:
    """Sorted by (state, x): true where an earlier label of the state has y and z at most as large.

    Divide and conquer from the bottom: in each block of 2 w labels, is one of the left half
    below one of the right half? Sorted by y, that is a running minimum of z."""
    n = len(y)
    dominated = np.zeros(n, dtype=bool)
    # an earlier state gets the larger y, so that it is below nothing
    by_y = np.lexsort((np.arange(n), y, -state))
    height = _ranks(z)
    width = 1
    while width < n:
        order = by_y[np.argsort(by_y // (2 * width), kind="stable")]
        block = order // (2 * width)
        left = (order // width) % 2 == 0
        floor = -block * (n + 1)  # later blocks lie below earlier ones
        least = np.minimum.accumulate(np.where(left, height[order], n) + floor)
        dominated[order] |= ~left & (least <= height[order] + floor)
        width *= 2
    return dominated
