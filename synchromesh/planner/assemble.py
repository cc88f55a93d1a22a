"""The planner's problem of a model: options and link prices, of uniform partitions and a profile.

For every tensor degree m of K devices the step is partitioned under K/m x m. Component i
under that degree is option m: what it computes and sends inside, as it stands in that partition.
A value between components of equal degree costs the move that this partition makes on the border;
between degrees a and b it leaves in the state that a's maker makes and arrives in the state that
b's reader wants, over the cheapest way that `trace.edges` knows.

    forward    compute + blocking collectives                            seconds
    backward   the same + what gradient traffic takes of the device      seconds
    gradient   the all-reduce of its gradients                           seconds
    memory     parameters, gradients, optimizer state, kept activations  bytes

A component of which a degree shards nothing is not offered under it. Where rows depend on each
other it has one degree, that of all devices, which then compute all rows. The prediction of a plan
is made anew, exactly, by `planner.candidate`; this is what the search adds up. Two things of mixed
plans are not in it, as they depend on more than two components: leaves of the batch lie in the
finest blocks of rows that the plan has, and readers with coarser ones gather them, so that its sum
is too small by these gathers; and neighbours agree on states for the plan, which may be cheaper
than those of their uniform partitions, so that its sum is too large.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from synchromesh.cost.step_time import (
    Unmeasured,
    pattern,
)
from synchromesh.planner.parts import parts
from synchromesh.planner.problem import BATCH, Option, PricedEdge, Prices, Problem
from synchromesh.planner.uniform import DIRECTIONS, Uniform, holdings_of, payload, seconds_of
from synchromesh.trace.partition.edges import edge_collectives
from synchromesh.trace.partition.local import Input
from synchromesh.trace.partition.moves import TABLE, move_collectives
from synchromesh.values.component import Value
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import (
    PARTIAL,
    REPLICATED,
    REPLICATED_PARTIAL_GRADIENT,
    Placement,
)
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.traffic import Collective


def crossings(uniform: Uniform) -> list[tuple[str, Pattern, int]]:
    """Kinds, patterns and payloads of what may cross between degrees, for the survey."""
    found: dict[tuple[str, Pattern], int] = {}

    def note(collectives: Sequence[Collective], degree: int) -> None:
        for c in collectives:
            key = (c.kind, pattern(c))
            size = payload(uniform, c, uniform.layout(degree))
            found[key] = max(size, found.get(key, 0))

    for link in crossing_values(uniform):
        if link.source == BATCH:
            continue
        for a, b in product(link.made, uniform.degrees):
            wants = link.wants(b)
            if a == b or not wants:
                continue
            for have, want in product((link.made[a], REPLICATED), (*wants, REPLICATED)):
                note(_edge(uniform, link.value, have, want, a, b) or (), a)
            note(_move(uniform, link.value, link.made[a], REPLICATED, a), a)
            for want in wants:
                note(_move(uniform, link.value, REPLICATED, want, b), b)
    return [(kind, where, size) for (kind, where), size in sorted(found.items())]


def assemble(uniform: Uniform, profile: Profile) -> Problem:
    """Options and links. Unmeasured where the profile lacks what every option would need."""
    holding_of = {m: holdings_of(uniform, m) for m in uniform.degrees}
    known: dict[tuple[object, ...], tuple[Option, ...]] = {}
    components = []
    for i in range(len(uniform.step.chain.components)):
        options = tuple(
            option
            for border, m in enumerate(uniform.degrees)
            if uniform.offers(m, i)
            and (option := _option(uniform, m, border, i, holding_of[m], profile)) is not None
        )
        if not options:
            name = uniform.step.chain.names[i]
            raise Unmeasured(f"no layout of {name} could be measured")
        components.append(known.setdefault(options, options))
    values = crossing_values(uniform)
    links = zip(values, prices_of(uniform, values, profile), strict=True)
    return Problem(
        tuple(components), tuple(PricedEdge(v.source, v.readers, prices) for v, prices in links)
    )


# Options


def _option(
    uniform: Uniform,
    degree: int,
    border: int,
    index: int,
    holding_of: Mapping[str, Holding],
    profile: Profile,
) -> Option | None:
    """The component under one degree; None where nothing is sharded or nothing is known of it."""
    made = uniform.partitions[degree]
    local = made.components[index]
    only = not any(uniform.offers(m, index) for m in uniform.degrees if m != degree)
    if (
        degree > 1
        and not only
        and local.parameters
        and not any(made.placements[n, local.layout].sharded for n in local.parameters)
    ):
        return None
    found = parts(uniform, degree, index, holding_of, profile)
    if found is None:
        return None
    return Option(
        forward=found.forward,
        backward=found.backward + found.taken,
        gradient=found.gradient,
        update=found.update,
        memory=round(found.resident + found.kept),
        border=border,
    )


# Links


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
        return dict.fromkeys(
            self.wanted[degree, i] for i in self.readers if (degree, i) in self.wanted
        )


def crossing_values(uniform: Uniform) -> list[CrossingValue]:
    """Every value that crosses a border in some uniform partition, in order of its name's use."""
    inputs: dict[tuple[str, int], dict[int, dict[int, Input]]] = {}
    for m, made in uniform.partitions.items():
        for i, local in enumerate(made.components):
            for item in local.inputs:
                source = BATCH if item.source is None else item.source
                by_degree = inputs.setdefault((item.value.name, source), {})
                by_degree.setdefault(m, {}).setdefault(i, item)
    found = []
    for (_, source), by_degree in inputs.items():
        readers = tuple(sorted({i for items in by_degree.values() for i in items}))
        value = next(iter(next(iter(by_degree.values())).values())).value
        made_in = {
            m: _made(uniform, m, by_degree.get(m, {}))
            for m in uniform.degrees
            if source == BATCH or uniform.offers(m, source)
        }
        wanted = {
            (m, i): by_degree[m][i].want if i in by_degree.get(m, {}) else REPLICATED
            for m in uniform.degrees
            for i in readers
            if uniform.offers(m, i)
        }
        found.append(CrossingValue(value, source, readers, made_in, wanted))
    return found


def _made(uniform: Uniform, degree: int, read: Mapping[int, Input]) -> Placement:
    """The state in which a value is made under a degree, as its readers find it: those of the same
    degree before others."""
    near = sorted(read, key=lambda i: not uniform.offers(degree, i))
    return read[near[0]].have if near else REPLICATED


def prices_of(uniform: Uniform, values: Iterable[CrossingValue], profile: Profile) -> list[Prices]:
    """What each value costs between all degrees; equal tables are one."""
    shared: dict[object, Prices] = {}
    found = []
    for value in values:
        prices = _prices(uniform, value, profile)
        key = (prices.forward.tobytes(), prices.backward.tobytes(), prices.form)
        found.append(shared.setdefault(key, prices))
    return found


def _prices(uniform: Uniform, link: CrossingValue, profile: Profile) -> Prices:
    """Seconds by (border of the source, border of the reader): one form for each degree."""
    count = len(uniform.degrees)
    sources = (0,) if link.source == BATCH else range(count)
    tables = {d: np.zeros((len(sources), count)) for d in DIRECTIONS}
    for row in sources:
        for column, b in enumerate(uniform.degrees):
            a = uniform.degrees[row] if link.source != BATCH else None
            if not link.wants(b) or (a is not None and a not in link.made):
                continue  # which nobody asks for
            for direction, seconds in zip(
                DIRECTIONS, cheapest(uniform, link, a, b, profile), strict=True
            ):
                tables[direction][row, column] = seconds
    return Prices(tables["forward"], tables["backward"], tuple(range(count)))


def cheapest(
    uniform: Uniform, link: CrossingValue, a: int | None, b: int, profile: Profile
) -> tuple[float, float]:
    """Seconds forward and backward from degree `a` to degree `b` (None: leaves of the batch, whose
    gathers are left out, as the module says)."""
    if a is None:
        return 0.0, 0.0
    wants = link.wants(b)
    if a == b:
        moves = [m for w in wants for m in _move(uniform, link.value, link.made[a], w, a)]
        return _both(uniform, moves, uniform.layout(a), profile)
    best = (float("inf"), float("inf"))
    for have in dict.fromkeys((link.made[a], *_STATES)):
        leaving = _move(uniform, link.value, link.made[a], have, a)
        for want in dict.fromkeys((*wants, REPLICATED)):
            edge = _edge(uniform, link.value, have, want, a, b)
            if edge is None or leaving is None:
                continue
            arriving = [m for w in wants for m in _move(uniform, link.value, want, w, b)]
            try:
                crossed = [
                    _both(uniform, leaving, uniform.layout(a), profile),
                    _both(uniform, edge, uniform.layout(a), profile),
                    _both(uniform, arriving, uniform.layout(b), profile),
                ]
            except Unmeasured:
                continue
            forward, backward = (sum(x) for x in zip(*crossed, strict=True))
            best = min(best, (forward, backward), key=sum)
    return best


_STATES = (REPLICATED, REPLICATED_PARTIAL_GRADIENT, PARTIAL)


def _both(
    uniform: Uniform, found: Sequence[Collective], layout: Layout, profile: Profile
) -> tuple[float, float]:
    forward, backward = (seconds_of(uniform, found, layout, d, profile) for d in DIRECTIONS)
    return forward, backward


def _move(
    uniform: Uniform, value: Value, have: Placement, want: Placement, degree: int
) -> tuple[Collective, ...]:
    """The collectives of a move on one axis; through the unsharded value where there is no way."""
    if have == want or degree == 1:
        return ()
    if (have.kind, want.kind) not in TABLE:
        return ()
    return move_collectives(value, have, want, degree, value.differentiable)


def _edge(
    uniform: Uniform, value: Value, have: Placement, want: Placement, a: int, b: int
) -> tuple[Collective, ...] | None:
    source, target = uniform.layout(a), uniform.layout(b)
    return edge_collectives(value, have, want, source, target, value.differentiable)
