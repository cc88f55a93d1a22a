"""The ways to run every stage, of sums over its components.

A stage of components i .. j-1 on g devices under tensor degree d, g/d x d, of a micro-batch:

    t         = max(c + (1 - a) w, w / b)     c = begin + sum of forward + backward
    w         = message(i) + message(j)       a, b: rates of what is computed and sent at once
    x         = 2 message(i)                  the micro-batch arrives, its gradient goes back
    e         = max over q of (sum of gradient from i to q - sum of backward from i to q-1)
                + sum of update
    resident  = sum of resident               kept = sum of kept

Backward runs from component j-1 to i: what is summed for q and those before it begins when the
backward of q ends, so that e is what is left of it when i is done. All components of a stage have
one degree here; `stage_mixes` gives them degrees of their own in the stages that are found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from synchromesh.planner.chain.problem import Floats
from synchromesh.planner.stages.problem import Ways
from synchromesh.values.profile import Overlap

INF = float("inf")
UNDISTURBED = Overlap()


@dataclass(frozen=True, eq=False)
class StageFacts:
    """What each component takes for a micro-batch on g devices under a tensor degree.

    Arrays by component: seconds, then bytes on a device. `message`: seconds by cut 0 .. n, of what
    a device sends over it, and as many of what it receives."""

    forward: Floats
    backward: Floats
    gradient: Floats  # all-reduce of its gradients, once a step
    update: Floats  # the optimizer's step
    resident: Floats  # parameters, gradients, optimizer state
    kept: Floats  # of a micro-batch in flight
    message: Floats
    begin: float = 0.0  # s of a micro-batch whatever its components
    overlap: Overlap = UNDISTURBED


Find = Callable[[int, int], StageFacts | None]  # of g devices under a degree; None: not offered


def stage_ways(find: Find, sizes: Sequence[int], degrees: Sequence[int], count: int) -> Ways:
    """The ways of all stages of `count` components: one for each degree."""
    shape = (len(degrees), count, count + 1, len(sizes))
    seconds, fill, end, resident, kept = (np.zeros(shape) for _ in range(5))
    seconds[:] = INF
    for s, size in enumerate(sizes):
        for w, degree in enumerate(degrees):
            facts = None if size % degree else find(size, degree)
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
    return Ways(seconds, fill, end, resident, kept)


def _sums(values: Floats) -> Floats:
    """Sums of components i .. j-1 by [i, j]."""
    until = np.r_[0.0, np.cumsum(values)]
    found: Floats = until - until[:-1, None]
    return found


def _unhidden(facts: StageFacts) -> Floats:
    """Seconds of gradient traffic after the last backward, by [i, j]."""
    sent = np.r_[0.0, np.cumsum(facts.gradient)]
    computed = np.r_[0.0, np.cumsum(facts.backward)]
    count = len(facts.gradient)
    later = np.tri(count).T.astype(bool)  # q >= i
    left = np.where(later, sent[1:] - computed[:-1], -INF)
    left = np.maximum.accumulate(left, axis=1) - (sent - computed)[:-1, None]
    found: Floats = np.c_[np.zeros(count), left]
    return found


@dataclass(frozen=True)
class OfferTuning:
    """What is offered to the search; chosen, so that it ends in seconds."""

    all_sizes: int = 16  # devices up to which a group may have any size
    units: int = 128  # at most: parts of the devices that sizes are multiples of
    micro_batches: int = 1024  # at most


TUNING = OfferTuning()


def group_sizes(devices: int) -> tuple[int, ...]:
    """Sizes of groups that are offered, ascending: of few devices all, of many 1, 2, 3, 4, 6, 8,
    12 ... parts and divisors, and what each leaves of all devices."""
    if devices <= TUNING.all_sizes:
        return tuple(range(1, devices + 1))
    parts = max(n for n in range(1, TUNING.units + 1) if devices % n == 0)
    some = {n << k for n in (1, 3) for k in range(parts.bit_length()) if n << k <= parts}
    some |= {n for n in range(1, parts + 1) if parts % n == 0}
    some |= {parts - n for n in some if n < parts}
    return tuple(devices // parts * n for n in sorted(some))


def micro_batch_numbers(rows: int) -> tuple[int, ...]:
    """Numbers of micro-batches that are offered, of equally many rows: powers of two, and all
    divisors where less than eight is a power of two among them."""
    found = [m for m in range(1, min(rows, TUNING.micro_batches) + 1) if rows % m == 0]
    powers = [m for m in found if m & (m - 1) == 0]
    return tuple(powers if powers[-1] >= 8 else found)
