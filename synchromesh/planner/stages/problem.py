"""The problem of pipeline stages: ways to run each stage, one step time, memory in flight.

Stage s runs neighbouring components on its own group of devices, in one of several ways, for each
of m micro-batches:

    t_s   seconds between two micro-batches: forward and backward, or messages where these take
          longer; times the slowdown of the group's slowest device
    x_s   seconds more until the next stage has the first micro-batch, and its gradient is back
    e_s   seconds after the last backward: gradient traffic that is not hidden, the update

    1F1B, GPipe    T = sum_s (t_s + x_s)  +  max_s ((m - 1) t_s + e_s)
    memory         resident_s + min(p - s, m) kept_s  <=  limit                  1F1B, stage s of p
                   resident_s + m kept_s              <=  limit                  GPipe

T: the first micro-batch passes all stages, then the slowest stage sets the pace (Narayanan et al.
2021, arXiv 2104.04473, section 2.2, with unequal stages and the end of a step). Both schedules
take equally long and 1F1B holds no more, so that it stands for both here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

from synchromesh.planner.chain.dominance import Bools
from synchromesh.planner.chain.problem import Floats
from synchromesh.planner.chain.table import Ints


@dataclass(frozen=True, eq=False)
class Ways:
    """The ways to run every stage for one number of micro-batches; each array is
    [way, first component i, end j, size of the group], `seconds` inf where there is none."""

    seconds: Floats  # t
    fill: Floats  # x
    end: Floats  # e
    resident: Floats  # bytes on a device: parameters, gradients, optimizer state
    kept: Floats  # bytes on a device of a micro-batch in flight


@dataclass(frozen=True, order=True)
class PlannedStage:
    """Components first .. end-1 on `devices` devices, run in a way."""

    first: int
    end: int
    devices: int
    way: int
    ways: tuple[int, ...] = ()  # of each component, where they differ (`stage_mixes`)

    @property
    def way_of(self) -> tuple[int, ...]:
        """The way of each component."""
        return self.ways or (self.way,) * (self.end - self.first)


@dataclass(frozen=True)
class StagePlan:
    """Stages in order on the devices in order, and what a step takes.

    gap: no plan takes less than (1 - gap) of the seconds."""

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    seconds: float
    gap: float = 0.0
    chunks: int = 1  # stages of each group; above 1 it is interleaved 1F1B


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Components in a chain, devices in order, and what may be chosen.

    sizes: of groups, ascending; every device belongs to one. limits, slowdowns: of each device, in
    order: bytes, and seconds for what takes the fastest one. ways: by number of micro-batches."""

    components: int
    sizes: tuple[int, ...]
    limits: tuple[float, ...]
    slowdowns: tuple[float, ...]
    micro_batches: tuple[int, ...]
    ways: Callable[[int], Ways]

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.limits)

    @cached_property
    def unit(self) -> int:
        """What every group's size is a multiple of."""
        return gcd(self.devices, *self.sizes)

    @cached_property
    def kinds(self) -> tuple[tuple[float, float], ...]:
        """The different groups: slowdown of the slowest device, bytes of the smallest."""
        return tuple(sorted({self.kind(s, g) for g in self.sizes for s in self._starts(g)}))

    def only(self, allowed: Callable[[Ints, Ints, Ints], Bools]) -> "StageProblem":
        """The problem with those stages alone that are `allowed`, by arrays of first component,
        end and devices."""
        first, end, size = np.ogrid[: self.components, : self.components + 1, : len(self.sizes)]
        mask = allowed(first, end, np.array(self.sizes)[size])

        def ways(micro_batches: int) -> Ways:
            found = self.ways(micro_batches)
            return replace(found, seconds=np.where(mask, found.seconds, np.inf))

        return replace(self, ways=ways)

    def kind(self, start: int, size: int) -> tuple[float, float]:
        """Slowdown and bytes of the group of `size` devices from device `start` on."""
        group = slice(start, start + size)
        return max(self.slowdowns[group]), min(self.limits[group])

    @cached_property
    def kind_of(self) -> Ints:
        """The kind by [size, units of devices that are left]: a group takes the first of these;
        0 where it does not fit."""
        found = np.zeros((len(self.sizes), self.devices // self.unit + 1), dtype=np.int64)
        index = {kind: i for i, kind in enumerate(self.kinds)}
        for s, size in enumerate(self.sizes):
            for start in self._starts(size):
                left = (self.devices - start) // self.unit
                found[s, left] = index[self.kind(start, size)]
        return found

    def _starts(self, size: int) -> range:
        return range(0, self.devices - size + 1, self.unit)


def in_flight(depth: int, micro_batches: int) -> int:
    """Micro-batches that a stage holds at most under 1F1B; depth: 1 for the last stage."""
    return min(depth, micro_batches)


def evaluate(problem: StageProblem, plan: Sequence[PlannedStage], micro_batches: int) -> float:
    """Seconds of a step under 1F1B; inf where memory does not suffice."""
    ways = problem.ways(micro_batches)
    total, slowest, start = 0.0, 0.0, 0
    for s, stage in enumerate(plan):
        at = (stage.way, stage.first, stage.end, problem.sizes.index(stage.devices))
        slowdown, limit = problem.kind(start, stage.devices)
        held = in_flight(len(plan) - s, micro_batches) * ways.kept[at]
        if ways.resident[at] + held > limit or np.isinf(ways.seconds[at]):
            return float("inf")
        seconds = slowdown * ways.seconds[at]
        total += seconds + ways.fill[at]
        slowest = max(slowest, (micro_batches - 1) * seconds + ways.end[at])
        start += stage.devices
    return float(total + slowest)
