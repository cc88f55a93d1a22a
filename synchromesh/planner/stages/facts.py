"""The problem of stages of a model: facts of every group, of uniform partitions and a profile.

The programs of a tensor degree d do not depend on the data degree, so that the partitions of all K
devices under d say what a group of g devices does, g/d x d: for each of m micro-batches

    rows      ceil(ceil(N / m) / (g / d)) of a device
    message   C_send(bytes of all values made before and read behind the cut, of these rows)
    begin     of a forward and a backward (`Calls`)

Seconds of unequal devices are those of the quick ones times the slowdown of the group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from synchromesh.cost.planned_step import Unmeasured, collective_seconds
from synchromesh.planner.chain.component_costs import ComponentCosts, component_costs
from synchromesh.planner.chain.links import (
    CrossingValue,
    between_components,
    cheapest,
    crossings,
    prices_of,
)
from synchromesh.planner.chain.problem import Floats, PricedEdge
from synchromesh.planner.problem import GRADIENT_BYTES, Demand, PlanningProblem
from synchromesh.planner.stages.mixes import Inside
from synchromesh.planner.stages.problem import (
    PlannedStage,
    StageFacts,
    StageProblem,
    group_sizes,
    micro_batch_numbers,
    stage_costs,
)
from synchromesh.planner.uniform import UniformPartitions, holdings_of, kinds
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Overlap, Pattern, Profile

MESSAGE = "send"


def stage_sizes(devices: int, all_sizes: int = 4) -> tuple[int, ...]:
    """Sizes of groups that are offered, below all devices; of more than `all_sizes` (chosen)
    divisors and what they leave, as each size asks for curves of its own."""
    sizes = group_sizes(devices)
    if devices > all_sizes:
        even = {g for g in sizes if devices % g == 0}
        sizes = tuple(g for g in sizes if g in even or devices - g in even)
    return tuple(g for g in sizes if g < devices)


def stage_demands(uniform: UniformPartitions) -> list[Demand]:
    """Collectives and messages of groups that are offered, for the survey."""
    if not divisible(uniform):
        return []
    demands: list[Demand] = []
    values = between_components(uniform)
    parameters = [p for c in uniform.step.chain.components for p in c.parameters]
    gradients = sum(p.bytes for p in parameters if p.trainable)
    for size in stage_sizes(uniform.devices):
        message = max(_over_cuts(uniform, values, -(-uniform.rows // size)), default=0)
        demands.append((MESSAGE, Pattern(2, size), message))
        for degree in uniform.degrees:
            if size % degree == 0 and size > degree:
                ranks = Pattern(size // degree, degree)
                demands.append(("all_reduce", ranks, min(gradients, GRADIENT_BYTES)))
        demands += _crossings(uniform, size)
    return demands


def _crossings(uniform: UniformPartitions, size: int) -> list[Demand]:
    """What crosses between degrees inside a group and not on all devices. Degrees a and b = k a
    cross on k ranks, whatever the group, and with as many micro-batches as there are groups on as
    many rows; those that do not nest cross on all ranks of the group."""
    own = {d: made for d, made in uniform.partitions.items() if size % d == 0}
    if all(max(a, b) % min(a, b) == 0 for a in own for b in own):
        return []
    rows = -(-uniform.rows * size // uniform.devices)
    group = replace(uniform, devices=size, rows=rows, partitions=own)
    return [demand for demand in crossings(group) if demand[1] == Pattern(size)]


def divisible(uniform: UniformPartitions) -> bool:
    """Whether there can be stages; not where rows depend on each other: these need all devices."""
    step = uniform.step
    return uniform.devices > 1 and len(step.chain.components) > 1 and not step.coupling


def stage_problem(
    facts: "GroupFacts", planned: PlanningProblem, order: Sequence[int],
    slowdowns: Sequence[float], most: int = 32,
) -> StageProblem:  # fmt: skip
    """The problem of two stages and more, on ranks in `order`. slowdowns: of each rank. most:
    micro-batches; small programs are quicker on the line than they are. Chosen, not measured."""
    uniform = facts.uniform
    limits = planned.limits or (float("inf"),) * uniform.devices
    sizes, count = stage_sizes(uniform.devices), len(planned.names)
    costs = cache(lambda m: stage_costs(facts, m, sizes, uniform.degrees, count))
    numbers = tuple(m for m in micro_batch_numbers(uniform.rows) if m <= most)
    limits, slowdowns = (tuple(of_rank[r] for r in order) for of_rank in (limits, slowdowns))
    return StageProblem(count, sizes, limits, slowdowns, numbers, costs)


class GroupFacts:
    """The facts of components by group, degree and number of micro-batches, on `quick` ranks."""

    def __init__(self, uniform: UniformPartitions, profile: Profile, quick: Sequence[int]) -> None:
        self.uniform, self.profile = uniform, profile
        self._ranks = quick if len(quick) < len(profile.relative_slowdowns) else None
        self._values = between_components(uniform)
        self._holdings: dict[int, tuple[Mapping[str, Holding], tuple[int, ...]]] = {}
        self._known: dict[tuple[int, int, int], StageFacts | None] = {}

    def __call__(self, size: int, degree: int, micro_batches: int) -> StageFacts | None:
        """None where something of them is not known, or a device would have no row."""
        alone = self._alone(size, degree, micro_batches)
        if alone is None:
            return None
        try:
            return self._moved(alone, self._group(size, micro_batches), degree, self._values)
        except Unmeasured:
            return None

    def inside(self, stage: PlannedStage, micro_batches: int) -> Inside | None:
        """What may be mixed in a stage; None: it has one way."""
        size, first, end = stage.devices, stage.first, stage.end
        known = {
            degree: alone
            for degree in self.uniform.degrees
            if self(size, degree, micro_batches) is not None
            and (alone := self._alone(size, degree, micro_batches)) is not None
        }
        if len(known) < 2:
            return None
        group = self._group(size, micro_batches)
        group = replace(group, partitions={d: group.partitions[d] for d in known})
        made = [v for v in self._values if first <= v.source < end]
        behind = [v for v in made if v.readers[0] >= end]
        facts = [self._moved(alone, group, d, behind) for d, alone in known.items()]
        ways = tuple(self.uniform.degrees.index(degree) for degree in known)
        within = [v for v in made if v.readers[0] < end]
        links = tuple(
            PricedEdge(v.source - first, tuple(r - first for r in v.readers if r < end), prices)
            for v, prices in zip(within, prices_of(group, within, self.profile), strict=True)
        )
        return Inside(ways, tuple(facts), links)

    def _group(self, size: int, micro_batches: int) -> UniformPartitions:
        return replace(self.uniform, devices=size, rows=-(-self.uniform.rows // micro_batches))

    def _alone(self, size: int, degree: int, micro_batches: int) -> StageFacts | None:
        """Without what moves between components."""
        key = (size, degree, micro_batches)
        if key not in self._known:
            group = self._group(size, micro_batches)
            possible = size % degree == 0 and size // degree <= group.rows
            try:
                self._known[key] = self._facts(group, degree) if possible else None
            except Unmeasured:
                self._known[key] = None
        return self._known[key]

    def _facts(self, group: UniformPartitions, degree: int) -> StageFacts:
        profile = self.profile
        if degree not in self._holdings:
            holding_of = holdings_of(self.uniform, degree)
            self._holdings[degree] = holding_of, kinds(self.uniform, degree, holding_of)
        holding_of, numbers = self._holdings[degree]

        @cache
        def of_kind(kind: int) -> ComponentCosts:
            i = numbers.index(kind)
            return component_costs(group, degree, i, holding_of, profile, self._ranks)

        known, calls = [*map(of_kind, numbers)], profile.calls
        return StageFacts(
            np.array([max(0.0, p.forward + calls.forward) for p in known]),
            np.array([max(0.0, p.backward + calls.backward) for p in known]),
            np.array([p.gradient for p in known]), np.array([p.update + p.taken for p in known]),
            np.array([p.resident for p in known]), np.array([p.kept for p in known]),
            self._messages(group, degree), begin=calls.begin_forward + calls.begin_backward,
            overlap=profile.overlap.get(MESSAGE, Overlap()),
        )  # fmt: skip

    def _moved(
        self, facts: StageFacts, group: UniformPartitions, degree: int,
        values: Sequence[CrossingValue],
    ) -> StageFacts:  # fmt: skip
        """With what values take that move between components of one degree."""
        forward, backward = facts.forward.copy(), facts.backward.copy()
        for value in values:
            there, back = cheapest(group, value, degree, degree, self.profile)
            forward[value.source] += there
            backward[value.source] += back
        return replace(facts, forward=forward, backward=backward)

    def _messages(self, group: UniformPartitions, degree: int) -> Floats:
        rows = -(-group.rows // group.layout(degree).data)
        pair = Pattern(2, group.devices)  # neighbours of equal size
        sizes = _over_cuts(group, self._values, rows)
        return np.array([collective_seconds(MESSAGE, pair, n, self.profile) for n in sizes])


def _over_cuts(
    uniform: UniformPartitions, values: Sequence[CrossingValue], rows: int
) -> list[int]:
    """Bytes of all values made before and read behind each cut, 0 .. n, of so many rows."""
    sizes = [0] * (len(uniform.step.chain.components) + 1)
    for value in values:
        for cut in range(value.source + 1, max(value.readers) + 1):
            sizes[cut] += value.value.bytes(rows)
    return sizes
