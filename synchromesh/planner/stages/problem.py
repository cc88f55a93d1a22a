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
take equally long and 1F1B holds no more, so that it stands for both here.

A way is a tensor degree of all components of a stage (`mixes` gives them degrees of their own in
the stages that are found). Of components i .. j-1 on g devices under degree d, g/d x d:

    t         = max(c + (1 - a) w, w / b)     c = begin + sum of forward + backward
    w         = message(i) + message(j)       a, b: rates of what is computed and sent at once
    x         = 2 message(i)                  the micro-batch arrives, its gradient goes back
    e         = max over q of (sum of gradient from i to q - sum of backward from i to q-1)
                + sum of update
    resident  = sum of resident               kept = sum of kept

Backward runs from component j-1 to i: what is summed for q and those before it begins when the
backward of q ends, so that e is what is left of it when i is done."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

from synchromesh.planner.chain.problem import Bools, Floats, Ints
from synchromesh.values.profile import Overlap


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What every stage takes in every way for one number of micro-batches; each array is
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
    ways: tuple[int, ...] = ()  # of each component, where they differ (`mixes`)

    @property
    def way_of(self) -> tuple[int, ...]:
        return self.ways or (self.way,) * (self.end - self.first)


@dataclass(frozen=True)
class StagePlan:
    """Stages and devices in order; no plan takes less than (1 - gap) of the seconds."""

    stages: tuple[PlannedStage, ...]
    micro_batches: int
    seconds: float
    gap: float = 0.0
    chunks: int = 1  # stages of each group; above 1 it is interleaved 1F1B


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Components in a chain, devices in order, and what may be chosen. sizes: of groups,
    ascending; every device belongs to one. limits, slowdowns: of each device, in order: bytes, and
    seconds for what takes the fastest one. costs: by number of micro-batches."""

    components: int
    sizes: tuple[int, ...]
    limits: tuple[float, ...]
    slowdowns: tuple[float, ...]
    micro_batches: tuple[int, ...]
    costs: Callable[[int], StageCosts]

    @property
    def devices(self) -> int:
        return len(self.limits)

    @cached_property
    def unit(self) -> int:
        return gcd(self.devices, *self.sizes)

    @cached_property
    def kinds(self) -> tuple[tuple[float, float], ...]:
        """The different groups: slowdown of the slowest device, bytes of the smallest."""
        return tuple(sorted({self.kind(s, g) for g in self.sizes for s in self._starts(g)}))

    def only(self, allowed: Callable[[Ints, Ints, Ints], Bools]) -> "StageProblem":
        """With the stages alone that `allowed` says by arrays of first component, end, devices."""
        first, end, size = np.ogrid[: self.components, : self.components + 1, : len(self.sizes)]
        mask = allowed(first, end, np.array(self.sizes)[size])

        def costs(micro_batches: int) -> StageCosts:
            unmasked = self.costs(micro_batches)
            return replace(unmasked, seconds=np.where(mask, unmasked.seconds, np.inf))

        return replace(self, costs=costs)

    def kind(self, start: int, size: int) -> tuple[float, float]:
        """Slowdown and bytes of the group of `size` devices from device `start` on."""
        group = slice(start, start + size)
        return max(self.slowdowns[group]), min(self.limits[group])

    @cached_property
    def kind_of(self) -> Ints:
        """The kind by [size, units left]: a group takes the first of these; 0 if it cannot."""
        table = np.zeros((len(self.sizes), self.devices // self.unit + 1), dtype=np.int64)
        index = {kind: i for i, kind in enumerate(self.kinds)}
        for s, size in enumerate(self.sizes):
            for start in self._starts(size):
                left = (self.devices - start) // self.unit
                table[s, left] = index[self.kind(start, size)]
        return table

    def _starts(self, size: int) -> range:
        return range(0, self.devices - size + 1, self.unit)


INF = float("inf")
UNDISTURBED = Overlap()


@dataclass(frozen=True, eq=False)
class StageFacts:
    """What each component takes for a micro-batch on g devices under a tensor degree. Arrays by
    component: seconds, then bytes on a device. `message`: seconds by cut 0 .. n, of what a device
    sends over it, and as many of what it receives."""

    forward: Floats
    backward: Floats
    gradient: Floats  # all-reduce of its gradients, once a step
    update: Floats  # the optimizer's step
    resident: Floats  # parameters, gradients, optimizer state
    kept: Floats  # of a micro-batch in flight
    message: Floats
    begin: float = 0.0  # s of a micro-batch whatever its components
    overlap: Overlap = UNDISTURBED


# of g devices under a degree, in m micro-batches; None: not offered
Find = Callable[[int, int, int], StageFacts | None]


def stage_costs(
    find: Find, m: int, sizes: Sequence[int], degrees: Sequence[int], count: int
) -> StageCosts:
    """What all stages of `count` components take of m micro-batches: a way for each degree."""
    shape = (len(degrees), count, count + 1, len(sizes))
    seconds, fill, end, resident, kept = (np.zeros(shape) for _ in range(5))
    seconds[:] = INF
    for s, size in enumerate(sizes):
        for w, degree in enumerate(degrees):
            facts = None if size % degree else find(size, degree, m)
            if facts is None:
                continue
            at = (w, slice(None), slice(None), s)
            message = facts.message
            traffic = message[:-1, None] + message
            a, b = facts.overlap.compute, facts.overlap.network
            computed = facts.begin + _sums(facts.forward + facts.backward)
            busy = np.maximum(computed + (1 - a) * traffic, traffic / b)
            inside = np.arange(count)[:, None] < np.arange(count + 1)
            seconds[at] = np.where(inside, busy, INF)
            fill[at] = 2 * message[:-1, None]
            end[at] = np.maximum(0.0, _unhidden(facts)) + _sums(facts.update)
            resident[at], kept[at] = _sums(facts.resident), _sums(facts.kept)
    return StageCosts(seconds, fill, end, resident, kept)


def _sums(values: Floats) -> Floats:
    """Sums of components i .. j-1 by [i, j]."""
    until = np.r_[0.0, np.cumsum(values)]
    sums: Floats = until - until[:-1, None]
    return sums


def _unhidden(facts: StageFacts) -> Floats:
    """Seconds of gradient traffic after the last backward, by [i, j]."""
    sent = np.r_[0.0, np.cumsum(facts.gradient)]
    computed = np.r_[0.0, np.cumsum(facts.backward)]
    count = len(facts.gradient)
    later = np.tri(count).T.astype(bool)  # q >= i
    left = np.where(later, sent[1:] - computed[:-1], -INF)
    left = np.maximum.accumulate(left, axis=1) - (sent - computed)[:-1, None]
    unhidden: Floats = np.c_[np.zeros(count), left]
    return unhidden


def group_sizes(devices: int, all_sizes: int = 16, units: int = 128) -> tuple[int, ...]:
    """Sizes of groups that are offered, ascending: of up to `all_sizes` devices all, of more 1, 2,
    3, 4, 6, 8, 12 ... parts and divisors, and what each leaves of all. units: parts of the
    devices that sizes are multiples of, at most. Both chosen, so that the search ends soon."""
    if devices <= all_sizes:
        return tuple(range(1, devices + 1))
    parts = max(_divisors(devices, units))
    powers = {n << k for n in (1, 3) for k in range(parts.bit_length())}
    some = {n for n in powers if n <= parts} | {*_divisors(parts, parts)}
    some |= {parts - n for n in some if n < parts}
    return tuple(devices // parts * n for n in sorted(some))


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, most + 1) if number % n == 0]


def micro_batch_numbers(rows: int, most: int = 1024) -> tuple[int, ...]:
    """Numbers of micro-batches that are offered, of equally many rows: powers of two, and all
    divisors where less than eight is a power of two among them. most: chosen."""
    divisors = _divisors(rows, min(rows, most))
    powers = [m for m in divisors if m & (m - 1) == 0]
    return tuple(powers if powers[-1] >= 8 else divisors)
