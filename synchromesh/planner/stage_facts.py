"""The problem of stages of a model: facts of every group of devices, of uniform partitions and a
profile.

The programs of a tensor degree d do not depend on the data degree, so that the partitions of all K
devices under d say what a group of g devices does, g/d x d: for each of m micro-batches

    rows      ceil(ceil(N / m) / (g / d)) of a device
    message   C_send(bytes of all values made before and read behind the cut, of these rows)
    begin     of a forward and a backward (`Calls`)

Seconds of unequal devices are those of the quick ones times the slowness of the group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from synchromesh.cost.step_time import Unmeasured, collective_seconds
from synchromesh.planner.assemble import CrossingValue, cheapest, crossing_values
from synchromesh.planner.demand import GRADIENT_BYTES, Demand
from synchromesh.planner.parts import parts
from synchromesh.planner.planning_problem import PlanningProblem
from synchromesh.planner.problem import BATCH, Floats
from synchromesh.planner.stage_costs import (
    StageFacts,
    group_sizes,
    micro_batch_numbers,
    stage_ways,
)
from synchromesh.planner.stage_problem import StageProblem, Ways
from synchromesh.planner.uniform import Uniform, holdings_of
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Overlap, Pattern, Profile

MESSAGE = "send"


@dataclass(frozen=True)
class StageOffer:
    """What of stages is measured and searched; chosen, not measured."""

    all_sizes: int = 4  # devices up to which groups of any size are offered; else divisors and
    # what they leave of all, because each size asks for curves of its own
    micro_batches: int = 32  # at most: small programs are quicker on the line than they are


OFFER = StageOffer()


def stage_sizes(devices: int) -> tuple[int, ...]:
    """The sizes of groups that are offered, below all devices."""
    sizes = group_sizes(devices)
    if devices > OFFER.all_sizes:
        even = {g for g in sizes if devices % g == 0}
        sizes = tuple(g for g in sizes if g in even or devices - g in even)
    return tuple(g for g in sizes if g < devices)


def stage_demands(uniform: Uniform) -> list[Demand]:
    """Collectives and messages of groups that are offered, for the survey."""
    if not divisible(uniform):
        return []
    demands: list[Demand] = []
    values = [v for v in crossing_values(uniform) if v.source != BATCH]
    bytes_ = sum(
        p.bytes for c in uniform.step.chain.components for p in c.parameters if p.trainable
    )
    for size in stage_sizes(uniform.devices):
        rows = -(-uniform.rows // size)
        message = max(_over_cuts(uniform, values, rows), default=0)
        demands.append((MESSAGE, Pattern(2, size), message))
        for degree in uniform.degrees:
            ranks = Pattern(size // degree, degree)
            if size % degree == 0 and ranks.size > 1:
                demands.append(("all_reduce", ranks, min(bytes_, GRADIENT_BYTES)))
    return demands


def divisible(uniform: Uniform) -> bool:
    """Whether there can be stages: several components, several devices, and rows that do not
    depend on each other, as those components have all devices."""
    step = uniform.step
    return uniform.devices > 1 and len(step.chain.components) > 1 and not step.coupling


def stage_problem(
    uniform: Uniform, planned: PlanningProblem, profile: Profile, order: Sequence[int],
    slowness: Sequence[float],
) -> StageProblem:  # fmt: skip
    """The problem of two stages and more, on ranks in `order`; slowness: of each rank."""
    limits = planned.limits or (float("inf"),) * uniform.devices
    facts = _Facts(uniform, profile, tuple(r for r in order if slowness[r] == 1.0))
    sizes, count = stage_sizes(uniform.devices), len(planned.names)

    @cache
    def ways(micro_batches: int) -> Ways:
        return stage_ways(
            lambda size, degree: facts(size, degree, micro_batches),
            sizes,
            uniform.degrees,
            count,
        )

    numbers = tuple(m for m in micro_batch_numbers(uniform.rows) if m <= OFFER.micro_batches)
    return StageProblem(
        count,
        sizes,
        tuple(limits[r] for r in order),
        tuple(slowness[r] for r in order),
        numbers,
        ways,
    )


class _Facts:
    """The facts of a model's components by group, degree and number of micro-batches."""

    def __init__(self, uniform: Uniform, profile: Profile, quick: Sequence[int]) -> None:
        self.uniform, self.profile, self.quick = uniform, profile, quick
        self.values = [v for v in crossing_values(uniform) if v.source != BATCH]
        self._holdings: dict[int, Mapping[str, Holding]] = {}

    def __call__(self, size: int, degree: int, micro_batches: int) -> StageFacts | None:
        """None where something of them is not known, or a device would have no row."""
        rows = -(-self.uniform.rows // micro_batches)
        if size // degree > rows:
            return None
        if degree not in self._holdings:
            self._holdings[degree] = holdings_of(self.uniform, degree)
        group = replace(self.uniform, devices=size, rows=rows)
        try:
            return self._facts(group, degree)
        except Unmeasured:
            return None

    def _facts(self, group: Uniform, degree: int) -> StageFacts | None:
        profile = self.profile
        ranks = self.quick if len(self.quick) < len(profile.speeds) else None
        found = [
            parts(group, degree, i, self._holdings[degree], profile, ranks)
            for i in range(len(group.step.chain.components))
        ]
        known = [p for p in found if p is not None]
        if len(known) < len(found):
            return None
        calls = profile.calls
        forward = np.array([max(0.0, p.forward + calls.forward) for p in known])
        backward = np.array([max(0.0, p.backward + calls.backward) for p in known])
        for value in self.values:
            there, back = cheapest(group, value, degree, degree, profile)
            forward[value.source] += there
            backward[value.source] += back
        return StageFacts(
            forward,
            backward,
            gradient=np.array([p.gradient for p in known]),
            update=np.array([p.update + p.taken for p in known]),
            resident=np.array([p.resident for p in known]),
            kept=np.array([p.kept for p in known]),
            message=self._messages(group, degree),
            begin=calls.begin_forward + calls.begin_backward,
            overlap=profile.overlap.get(MESSAGE, Overlap()),
        )

    def _messages(self, group: Uniform, degree: int) -> Floats:
        rows = -(-group.rows // group.layout(degree).data)
        pair = Pattern(2, group.devices)  # neighbours of equal size
        sizes = _over_cuts(group, self.values, rows)
        return np.array([collective_seconds(MESSAGE, pair, n, self.profile) for n in sizes])


def _over_cuts(uniform: Uniform, values: Sequence[CrossingValue], rows: int) -> list[int]:
    """Bytes of all values made before and read behind each cut, 0 .. n, of so many rows."""
    found = [0] * (len(uniform.step.chain.components) + 1)
    for value in values:
        for cut in range(value.source + 1, max(value.readers) + 1):
            found[cut] += value.value.bytes(rows)
    return found
