"""Links and collectives timed between the ranks of a world, and the line through the times.

All ranks call alike. A collective takes as long as on its slowest rank; a message half of the
quickest way to another rank and back."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from synchromesh.engine.reduce_scatter import PLAIN
from synchromesh.engine.world import World
from synchromesh.profiling.collectives import largest, prepared, timed, wait
from synchromesh.values.traffic import CollectiveKind, sent_bytes

KINDS: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class LinkTuning:
    """What is sent. Chosen."""

    sizes: tuple[int, ...] = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22)  # as in traffic.py
    quick_sizes: tuple[int, ...] = (1 << 10, 1 << 18, 1 << 20)
    calls: int = 3  # between two readings of the clock ...
    most_calls: int = 30  # ... and in all
    long_seconds: float = 1.0  # a call that takes longer is not tried with more bytes


TUNING = LinkTuning()
# Messages by size, and how many of each. Buffers and the burst of a shaped link swallow some
# 100 KB, so that only large ones show its rate.
MESSAGES = {1 << 10: 9, 1 << 20: 2, 1 << 22: 2}
QUICK_MESSAGES = {1 << 10: 5, 1 << 20: 2}


@dataclass(frozen=True)
class Line:
    """seconds = latency + bytes / bandwidth."""

    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Line":
        """The line with the least squares of relative errors through (bytes, seconds).

        Neither latency nor bandwidth is negative; where more bytes take no longer, the bandwidth
        is that of the largest size alone."""
        assert points and all(seconds > 0 for _, seconds in points), points
        sizes, times = np.array(points, dtype=float).T
        if len(points) > 1:
            rows = np.stack([1 / times, sizes / times], axis=1)
            latency, slope = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
            if latency >= 0 and slope > 0:
                return cls(float(latency), float(1 / slope))
            if latency < 0:
                x = sizes / times
                return cls(0.0, float((x @ x) / x.sum()))
        return cls(float(times.min()) if len(points) > 1 else 0.0, float(sizes[-1] / times[-1]))


@dataclass(frozen=True)
class CollectiveTiming:
    """A collective on all ranks: its way (of reduce-scatter alone), and (bytes, seconds)."""

    kind: CollectiveKind
    way: str
    ranks: int
    points: tuple[tuple[int, float], ...]  # payload bytes as in traffic.py

    @property
    def line(self) -> Line:
        """Latency, and bandwidth of what one rank sends (`traffic.sent_bytes`)."""
        return Line.through([(sent_bytes(self.kind, n, self.ranks), t) for n, t in self.points])


@dataclass(frozen=True)
class MessageTiming:
    """Messages between two ranks: (bytes, seconds one way)."""

    a: int
    b: int
    points: tuple[tuple[int, float], ...]

    @property
    def line(self) -> Line:
        return Line.through(self.points)


def collectives(world: World, seconds: float, quick: bool = False) -> list[CollectiveTiming]:
    """Every collective on all ranks at several sizes, within about `seconds`; [] on one rank."""
    if world.size == 1:
        return []
    sizes = TUNING.quick_sizes if quick else TUNING.sizes
    ways = [(k, way) for k in KINDS for way in (PLAIN if k == "reduce_scatter" else ("",))]
    each = seconds / len(sizes) / len(ways)
    timings = []
    for kind, way in ways:
        points: list[tuple[int, float]] = []
        for size in sizes:
            points.append((size, _collective(world, kind, way, size, each)))
            if points[-1][1] > TUNING.long_seconds:
                break
        timings.append(CollectiveTiming(kind, way, world.size, tuple(points)))
    world.choices.pop(world.everyone.ranks, None)  # of reduce-scatter: tried, not chosen
    return timings


def _collective(world: World, kind: CollectiveKind, way: str, size: int, seconds: float) -> float:
    group = world.everyone
    if way:
        world.choices[group.ranks] = way
    begin = prepared(group, kind, size)
    timed(world, lambda: begin()())
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < TUNING.most_calls:
        taken += [timed(world, lambda: begin()()) for _ in range(TUNING.calls)]
        if largest(world, time.perf_counter() - began) > seconds:  # all stop together
            break
    return median(taken)


def messages(
    world: World, pairs: Sequence[tuple[int, int]], quick: bool = False
) -> list[MessageTiming]:
    """Messages between pairs of ranks, one pair after the other; equal on every rank."""
    group, timed_here = world.everyone, []
    wanted = QUICK_MESSAGES if quick else MESSAGES
    for a, b in pairs:
        group.barrier()
        if world.rank in (a, b):
            _there_and_back(world, a, b, min(wanted), 1)  # the first one is not counted
            points = [(n, _there_and_back(world, a, b, n, calls)) for n, calls in wanted.items()]
            if world.rank == a:
                timed_here.append([a, b, points])
    gathered = [x for rank in group.all_gather_json(timed_here) for x in rank]
    return [MessageTiming(a, b, tuple((n, t) for n, t in points)) for a, b, points in gathered]


def _there_and_back(world: World, a: int, b: int, size: int, calls: int) -> float:
    """Seconds one way of the quickest: a process that waits for its core is not the link."""
    group, other = world.everyone, b if world.rank == a else a
    x = torch.zeros(size, dtype=torch.uint8, device=world.device)
    taken = []
    for _ in range(calls):
        began = time.perf_counter()
        if world.rank == a:
            group.exchange([(other, x)], [])
        group.exchange([], [(other, x)])
        if world.rank == b:
            group.exchange([(other, x)], [])
        wait(world)
        taken.append((time.perf_counter() - began) / 2)
    return min(taken)
