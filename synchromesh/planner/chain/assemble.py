"""The planner's problem of a model: options and link prices, of uniform partitions and a profile.

For every tensor degree m of K devices the step is partitioned under K/m x m. Component i
under that degree is option m: what it computes and sends inside, as it stands in that partition.
A value between components of equal degree costs the move that this partition makes on the border;
between degrees a and b it leaves in the state that a's maker makes and arrives in the state that
b's reader wants, over the cheapest way that `trace.edges` knows.

    forward    compute + blocking collectives                            seconds
    backward   the same + what gradient traffic takes of the device      seconds
    gradient   the all-reduce of its gradients                           seconds
    memory     parameters, gradients, optimizer state, kept activations  bytes, when the last
               component's backward is at work

Where memory is short, a degree has an option for each way to save it: its states sharded over data
ranks, its activations computed again. They have one border, as neighbours see nothing of that.

A component of which a degree shards nothing is not offered under it. Where rows depend on each
other it has one degree, that of all devices, which then compute all rows. The prediction of a plan
is made anew, exactly, by `planner.candidate`; this is what the search adds up. Two things of mixed
plans are not in it, as they depend on more than two components: leaves of the batch lie in the
finest blocks of rows that the plan has, and readers with coarser ones gather them, so that its sum
is too small by these gathers; and neighbours agree on states for the plan, which may be cheaper
than those of their uniform partitions, so that its sum is too large."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from synchromesh.cost.step_time import Unmeasured, pattern
from synchromesh.planner.chain.parts import Parts, parts
from synchromesh.planner.chain.problem import BATCH, Option, PricedEdge, Prices, Problem
from synchromesh.planner.uniform import (
    DIRECTIONS,
    Uniform,
    holdings_of,
    kinds,
    payload,
    seconds_of,
)
from synchromesh.trace.partition.local import Input
from synchromesh.trace.partition.moves import TABLE, edge_collectives, move_collectives
from synchromesh.values.component import Value
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, ShardStates
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


@dataclass(frozen=True)
class Assembled:
    """The problem of a model, and the layout that each option of its components stands for."""

    problem: Problem
    layouts: tuple[tuple[Layout, ...], ...]


Saving = tuple[ShardStates, bool]  # of memory: what is sharded, whether it is recomputed
AS_IS: tuple[Saving, ...] = (("none", False),)
# of the one micro-batch that the search knows: gradients of one are sharded at every level
SAVINGS: tuple[Saving, ...] = tuple(product(("none", "optimizer", "parameters"), (False, True)))


def assemble(uniform: Uniform, profile: Profile, savings: Sequence[Saving] = AS_IS) -> Assembled:
    """Options and links. savings: in which ways each component may be laid out under a degree.
    Unmeasured where the profile lacks what every option would need."""
    holding_of = {
        (m, states): holdings_of(uniform, m, states)
        for m in uniform.degrees
        for states in dict.fromkeys(states for states, _ in savings)
    }
    offers = _Offers(uniform, holding_of, profile)
    known: dict[tuple[Option, ...], tuple[Option, ...]] = {}
    components, layouts = [], []
    for i in range(len(uniform.step.chain.components)):
        found = {
            offers.layout(m, i, saving): option
            for border, m in enumerate(uniform.degrees)
            if uniform.offers(m, i)
            for saving in savings
            if (option := offers.option(m, border, i, saving)) is not None
        }
        if not found:
            name = uniform.step.chain.names[i]
            raise Unmeasured(f"no layout of {name} could be measured")
        options = tuple(found.values())
        components.append(known.setdefault(options, options))
        layouts.append(tuple(found))
    values = crossing_values(uniform)
    links = zip(values, prices_of(uniform, values, profile), strict=True)
    priced = tuple(PricedEdge(v.source, v.readers, prices) for v, prices in links)
    return Assembled(Problem(tuple(components), priced), tuple(layouts))


# Options


@dataclass(frozen=True)
class _Offers:
    """What a component is offered."""

    uniform: Uniform
    holding_of: Mapping[tuple[int, ShardStates], Mapping[str, Holding]]  # by degree and states
    profile: Profile
    _kinds: dict[tuple[int, ShardStates], tuple[int, ...]] = field(default_factory=dict)
    _known: dict[tuple[int, int, Saving], Parts | None] = field(default_factory=dict)

    @cached_property
    def first(self) -> Mapping[int, Mapping[str, int]]:
        """By degree: the first component that reads a value of another one."""
        found: dict[int, dict[str, int]] = {}
        for m, made in self.uniform.partitions.items():
            for i, local in enumerate(made.components):
                for item in local.inputs:
                    found.setdefault(m, {}).setdefault(item.value.name, i)
        return found

    def layout(self, degree: int, index: int, saving: Saving) -> Layout:
        """The layout of a component under a degree."""
        layout = self.uniform.partitions[degree].components[index].layout
        if self.uniform.offers(degree, index):
            layout = self.uniform.layout(degree)
        states, recompute = saving
        return replace(
            layout, shard_states=states if layout.data > 1 else "none", recompute=recompute
        )

    def option(self, degree: int, border: int, index: int, saving: Saving) -> Option | None:
        """The component under one degree; None where nothing is sharded or nothing is known of
        it."""
        uniform, (_, recompute) = self.uniform, saving
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
        found = self._parts(degree, index, saving)
        if found is None:
            return None
        waits = self._waits(degree, index, saving, found)
        last = index == len(uniform.step.chain.components) - 1
        alive = max(found.kept, found.working) if last else found.kept
        return Option(
            forward=found.forward + waits[0],
            backward=found.backward + found.taken + waits[1],
            gradient=found.gradient,
            update=found.update,
            memory=round(found.resident + alive + self._inputs(degree, index, recompute)),
            border=border,
        )

    def _parts(self, degree: int, index: int, saving: Saving) -> Parts | None:
        states, recompute = saving
        held = self.holding_of[degree, states]
        if (degree, states) not in self._kinds:
            self._kinds[degree, states] = kinds(self.uniform, degree, held)
        key = (degree, self._kinds[degree, states][index], saving)
        if key not in self._known:
            self._known[key] = parts(
                self.uniform, degree, index, held, self.profile, recompute=recompute
            )
        return self._known[key]

    def _waits(self, degree: int, index: int, saving: Saving, own: Parts) -> tuple[float, float]:
        """Seconds for which forward and backward wait for sharded parameters, which are gathered
        while the neighbour computes, in backward behind the gradients of the one before it; as if
        the neighbours had the same layout.

            forward    ( gather_i - forward_(i-1) )+
            backward   ( gather_i + gradient_(i+2) - backward_(i+1) )+"""
        count = len(self.uniform.step.chain.components)

        def near(place: int) -> Parts | None:
            return self._parts(degree, place, saving) if 0 <= place < count else None

        before, behind, further = (near(index + step) for step in (-1, 1, 2))
        forward = own.gathered - (before.forward if before else 0.0)
        backward = own.gathered_again - (behind.backward if behind else 0.0)
        backward += further.gradient if further and own.gathered_again else 0.0
        return max(0.0, forward), max(0.0, backward)

    def _inputs(self, degree: int, index: int, recompute: bool) -> float:
        """Bytes of the values of other components that it keeps for backward, and is the first to
        read."""
        made = self.uniform.partitions[degree]
        local = made.components[index]
        kept = self.profile.compute[local.program].memory.kept_inputs
        rows = -(-self.uniform.rows // self.layout(degree, index, AS_IS[0]).data)
        total = 0.0
        for number, item in enumerate(local.inputs):
            first = self.first[degree][item.value.name] == index
            if first and item.source is not None and (recompute or number in kept):
                value, share = item.value, local.layout.tensor if item.want.sharded else 1
                size = item.want.padded_bytes(value.bytes(1), value.shape, local.layout.tensor)
                total += size / share * (rows**value.rows.power if value.rows else 1.0)
        return total


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
