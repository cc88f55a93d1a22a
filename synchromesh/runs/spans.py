"""Spans: what a rank did from when to when, on a clock that is common to all ranks; and sets of
seconds, as sorted, disjoint intervals (start, end)."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

Interval = tuple[float, float]
Intervals = tuple[Interval, ...]
Kind = Literal["computation", "communication"]


@dataclass(frozen=True)
class Span:
    """Seconds in which one thing went on in one lane (a thread or a CUDA stream) of a rank.

    name    of a communication: all_reduce, all_gather, reduce_scatter, ..., send, receive; of a
            computation: the operator or kernel, or `host` for what runs between operators
    ranks   of a communication: all that take part; of a message (sender, receiver)"""

    start: float
    end: float
    kind: Kind
    name: str
    lane: str
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.start <= self.end, self

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Recording:
    """What one rank recorded: its spans by their starts, and the bounds of the recorded steps, in
    seconds since the Unix epoch."""

    rank: int
    steps: tuple[Interval, ...]
    spans: tuple[Span, ...]

    def later(self, seconds: float) -> "Recording":
        """The same with a clock that shows `seconds` more."""
        moved = (replace(s, start=s.start + seconds, end=s.end + seconds) for s in self.spans)
        steps = tuple((start + seconds, end + seconds) for start, end in self.steps)
        return Recording(self.rank, steps, tuple(moved))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with names and lanes as numbers into `texts`."""
        texts: dict[str, int] = {}

        def number(text: str) -> int:
            return texts.setdefault(text, len(texts))

        spans = [
            [s.start, s.end, number(s.kind), number(s.name), number(s.lane), *s.ranks]
            for s in self.spans
        ]
        steps = [list(bounds) for bounds in self.steps]
        return {"rank": self.rank, "steps": steps, "spans": spans, "texts": list(texts)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "Recording":
        """The inverse of `to_dict`."""
        texts: list[Any] = value["texts"]
        spans = tuple(
            Span(a, b, texts[kind], texts[name], texts[lane], tuple(ranks))
            for a, b, kind, name, lane, *ranks in value["spans"]
        )
        return cls(value["rank"], tuple((a, b) for a, b in value["steps"]), spans)


def by_start(spans: Iterable[Span]) -> tuple[Span, ...]:
    """In the order of their starts, those that contain others first."""
    return tuple(sorted(spans, key=lambda s: (s.start, -s.end)))


def union(intervals: Iterable[Interval]) -> Intervals:
    """What any of `intervals` covers; empty ones and those that end before they begin are none."""
    joined: list[list[float]] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return tuple((start, end) for start, end in joined)


def common(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """What both cover."""
    both, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(both)


def minus(a: Sequence[Interval], b: Sequence[Interval]) -> Intervals:
    """What `a` covers and `b` does not."""
    if not a:
        return ()
    first, last = a[0][0], a[-1][1]
    edges = [first, *(t for pair in b for t in pair), last]
    return common(a, union(zip(edges[::2], edges[1::2], strict=True)))


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
