"""Intervals of time: sets of seconds as sorted, disjoint pairs (start, end)."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]


def union(intervals: Iterable[Interval]) -> Intervals:
    """What any of `intervals` covers; empty ones and those that end before they begin are none."""
    found: list[list[float]] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if found and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return tuple((start, end) for start, end in found)


def common(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """What both cover."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def minus(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """What `a` covers and `b` does not."""
    if not a:
        return ()
    first, last = a[0][0], a[-1][1]
    edges = [first, *(t for pair in b for t in pair), last]
    outside = zip(edges[::2], edges[1::2], strict=True)
    return common(a, union(outside))


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that disjoint intervals cover."""
    return sum(end - start for start, end in intervals)


def covered_before(intervals: Sequence[Interval]) -> Callable[[float], float]:
    """The function from a time to the seconds that sorted, disjoint intervals cover before it."""
    starts = [start for start, _ in intervals]
    sums = [0.0, *accumulate(end - start for start, end in intervals)]

    def covered(time: float) -> float:
        at = bisect_right(starts, time) - 1
        return 0.0 if at < 0 else sums[at] + min(time, intervals[at][1]) - starts[at]

    return covered
