"""The links of a model's chain: values between components, and what each costs between degrees.

A value between components of equal degree costs the move that the partition of that degree makes
on the border; between degrees a and b it leaves in the state that a's maker makes and arrives in
the state that b's reader wants, over the cheapest way that `trace.edges` knows."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from synchromesh.cost.planned_step import Unmeasured, pattern
from synchromesh.planner.chain.problem import BATCH, Prices
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.trace.partition.local import Input
from synchromesh.trace.partition.moves import TABLE, edge_collectives, move_collectives
from synchromesh.values.component import Value
from synchromesh.values.placement import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL_GRADIENT,
    Placement,
)
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.traffic import Collective


@dataclass(frozen=True)
class CrossingValue:
    """A value between components: the state it is made in and read in, by degree."""

    value: Value
    source: int  # BATCH: a leaf
    readers: tuple[int, ...]
    made: Mapping[int, Placement]  # by degree that its maker is offered under
    wanted: Mapping[tuple[int, int], Placement]  # by degree and reader offered under it

    def wants(self, degree: int) -> dict[Placement, None]:
        """The states in which readers of a degree want it, in their order."""
        places = ((degree, i) for i in self.readers)
        return dict.fromkeys(self.wanted[at] for at in places if at in self.wanted)


def crossing_values(uniform: UniformPartitions) -> list[CrossingValue]:
    """Every value that crosses a border in some uniform partition, in order of its name's use."""
    inputs: dict[tuple[str, int], dict[int, dict[int, Input]]] = {}
    for m, made in uniform.partitions.items():
        for i, local in enumerate(made.components):
            for item in local.inputs:
                source = BATCH if item.source is None else item.source
                by_degree = inputs.setdefault((item.value.name, source), defaultdict(dict))
                by_degree[m].setdefault(i, item)
    return [_crossing(uniform, source, read) for (_, source), read in inputs.items()]


def between_components(uniform: UniformPartitions) -> list[CrossingValue]:
    """Those that are no leaves of the batch."""
    return [v for v in crossing_values(uniform) if v.source != BATCH]


def _crossing(
    uniform: UniformPartitions, source: int, read: Mapping[int, Mapping[int, Input]]
) -> CrossingValue:
    """The value of `source` that is `read`, by degree and reader."""
    readers = tuple(sorted({i for items in read.values() for i in items}))
    value = next(iter(next(iter(read.values())).values())).value
    offered = [m for m in uniform.degrees if source == BATCH or uniform.offers(m, source)]
    made = {m: _made(uniform, m, read.get(m, {})) for m in offered}
    wanted = {
        (m, i): read[m][i].want if i in read.get(m, {}) else REPLICATED
        for m, i in product(uniform.degrees, readers)
        if uniform.offers(m, i)
    }
    return CrossingValue(value, source, readers, made, wanted)


def _made(uniform: UniformPartitions, degree: int, read: Mapping[int, Input]) -> Placement:
    """The state in which a value is made, as its readers find it, those of its degree first."""
    near = sorted(read, key=lambda i: not uniform.offers(degree, i))
    return read[near[0]].have if near else REPLICATED


def prices_of(
    uniform: UniformPartitions, values: Iterable[CrossingValue], profile: Profile
) -> list[Prices]:
    """What each value costs between all degrees; equal tables are one."""
    shared: dict[object, Prices] = {}
    tables = []
    for value in values:
        prices = _prices(uniform, value, profile)
        key = (prices.forward.tobytes(), prices.backward.tobytes(), prices.form)
        tables.append(shared.setdefault(key, prices))
    return tables


def _prices(uniform: UniformPartitions, link: CrossingValue, profile: Profile) -> Prices:
    """Seconds by (border of the source, border of the reader): one form for each degree."""
    count = len(uniform.degrees)
    if link.source == BATCH:  # whose gathers are left out
        return Prices(np.zeros((1, count)), np.zeros((1, count)), tuple(range(count)))
    seconds = np.zeros((2, count, count))
    for (row, a), (column, b) in product(enumerate(uniform.degrees), repeat=2):
        if link.wants(b) and a in link.made:  # else nobody asks for it
            seconds[:, row, column] = cheapest(uniform, link, a, b, profile)
    return Prices(seconds[0], seconds[1], tuple(range(count)))


def cheapest(
    uniform: UniformPartitions, link: CrossingValue, a: int, b: int, profile: Profile
) -> tuple[float, float]:
    """Seconds forward and backward from degree `a` to `b`."""
    wants = link.wants(b)
    if a == b:
        moves = [m for w in wants for m in _move(link.value, link.made[a], w, a)]
        return uniform.seconds(moves, uniform.layout(a), profile)
    best = (float("inf"), float("inf"))
    for have in dict.fromkeys((link.made[a], *_STATES)):
        leaving = _move(link.value, link.made[a], have, a)
        for want in dict.fromkeys((*wants, REPLICATED)):
            edge = _edge(uniform, link.value, have, want, a, b)
            if edge is None:
                continue
            arriving = [m for w in wants for m in _move(link.value, want, w, b)]
            try:
                crossed = [
                    uniform.seconds(sent, uniform.layout(degree), profile)
                    for sent, degree in ((leaving, a), (edge, a), (arriving, b))
                ]
            except Unmeasured:
                continue
            forward, backward = (sum(x) for x in zip(*crossed, strict=True))
            best = min(best, (forward, backward), key=sum)
    return best


_STATES = (REPLICATED, REPLICATED_PARTIAL_GRADIENT, PARTIAL)


def _move(value: Value, have: Placement, want: Placement, degree: int) -> tuple[Collective, ...]:
    """The collectives of a move on one axis; through the unsharded value where there is no way."""
    if have == want or degree == 1 or (have.kind, want.kind) not in TABLE:
        return ()
    return move_collectives(value, have, want, degree, value.differentiable)


def _edge(
    uniform: UniformPartitions, value: Value, have: Placement, want: Placement, a: int, b: int
) -> tuple[Collective, ...] | None:
    source, target = uniform.layout(a), uniform.layout(b)
    return edge_collectives(value, have, want, source, target, value.differentiable)


def crossings(uniform: UniformPartitions) -> list[tuple[str, Pattern, int]]:
    """Kinds, patterns and payloads of what may cross between degrees, for the survey."""
    largest: dict[tuple[str, Pattern], int] = {}

    def note(collectives: Sequence[Collective], degree: int) -> None:
        for c in collectives:
            key = (c.kind, pattern(c))
            size = uniform.payload(c, uniform.layout(degree))
            largest[key] = max(size, largest.get(key, 0))

    for link in between_components(uniform):
        for a, b in product(link.made, uniform.degrees):
            wants = link.wants(b)
            if a == b or not wants:
                continue
            for have, want in product((link.made[a], REPLICATED), (*wants, REPLICATED)):
                note(_edge(uniform, link.value, have, want, a, b) or (), a)
            note(_move(link.value, link.made[a], REPLICATED, a), a)
            for want in wants:
                note(_move(link.value, REPLICATED, want, b), b)
    return [(kind, where, size) for (kind, where), size in sorted(largest.items())]
