"""The partitions of a step under every tensor degree of its devices, each uniform."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from synchromesh.cost.planned_step import collective_seconds, pattern
from synchromesh.planner.problem import PartitionCache
from synchromesh.trace.partition.local import Partition
from synchromesh.trace.step import Step
from synchromesh.values.holding import Holding, holdings
from synchromesh.values.layout import Layout, ShardStates
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.traffic import Collective


@dataclass(frozen=True)
class UniformPartitions:
    """The partitions of a step under every tensor degree of K devices; also of a group of other
    `devices` as far as the degree divides it: programs do not depend on data degrees."""

    step: Step
    devices: int
    rows: int
    partitions: Mapping[int, Partition]  # by tensor degree, ascending

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(self.partitions)

    def layout(self, degree: int) -> Layout:
        return Layout(self.devices // degree, degree)

    def resized(self, pattern: Pattern) -> Pattern:
        """The groups over data ranks of a partition, on these devices."""
        solved = self.partitions[self.degrees[0]].components[0].layout.devices
        return Pattern(pattern.size * self.devices // solved, pattern.stride)

    @cached_property
    def own(self) -> tuple[tuple[str, ...], ...]:
        """Of each component the parameters and buffers that it is the first to use."""
        known, made = set[str](), list[tuple[str, ...]]()
        for component in self.step.chain.components:
            names = dict.fromkeys(t.name for t in (*component.parameters, *component.buffers))
            made.append(tuple(name for name in names if name not in known))
            known.update(names)
        return tuple(made)

    def offers(self, degree: int, index: int) -> bool:
        """Whether a component may have the degree; if not, it has its own in that partition."""
        return self.partitions[degree].components[index].layout.tensor == degree

    def layout_of(self, degree: int, index: int) -> Layout:
        """The layout of a component in the partition of the degree, on these devices."""
        if self.offers(degree, index):
            return self.layout(degree)
        return self.partitions[degree].components[index].layout

    def payload(self, c: Collective, layout: Layout) -> int:
        return c.payload(-(-self.rows // (c.data or layout.data)))

    def seconds(
        self, collectives: Sequence[Collective], layout: Layout, profile: Profile
    ) -> tuple[float, float]:
        """Of those of forward, and of those of backward."""
        seconds = {"forward": 0.0, "backward": 0.0}
        for c in collectives:
            payload = self.payload(c, layout)
            seconds[c.direction] += collective_seconds(c.kind, pattern(c), payload, profile)
        return seconds["forward"], seconds["backward"]


def uniform_partitions(partitions: PartitionCache) -> UniformPartitions:
    """Partitioned under every tensor degree; under one where parameters cannot be sharded.
    Components whose rows depend on each other have all devices in each of them."""
    problem = partitions.problem
    step, devices, count = problem.step, problem.devices, len(problem.names)
    stated = (1,) if problem.unsplittable else degrees(devices)
    cut = {}
    for m in sorted({*stated, *([devices] if step.coupling else [])}):
        partitions.say(f"partitioning under tensor degree {m}, one of {len(stated)}")
        own = m if m in stated else stated[0]
        layouts = step.undivided((Layout(devices // own, own),) * count)
        cut[m] = partitions.of_layouts(layouts)
    return UniformPartitions(step, devices, problem.rows, cut)


# The highest tensor degree that is looked at. On 1,024 H100 a step of six blocks of GPT-2 of width
# 12,288 takes 0.65 s under degree 8, 1.7 under 64, 2.7 under 128, 29 under 1,024 by estimates, and
# the degrees above 64 took half of the time in which those of all were made.
MOST_TENSOR = 64


def degrees(devices: int) -> tuple[int, ...]:
    """The tensor degrees of layouts on `devices`: their divisors, up to `MOST_TENSOR`."""
    return tuple(m for m in range(1, min(devices, MOST_TENSOR) + 1) if devices % m == 0)


def holdings_of(
    uniform: UniformPartitions, degree: int, states: ShardStates = "none"
) -> Mapping[str, Holding]:
    """Where every parameter and buffer lies under a degree, with states sharded alike in all."""
    chain, made = uniform.step.chain, uniform.partitions[degree]
    tensors = {t.name: t for c in chain.components for t in (*c.parameters, *c.buffers)}
    made = made.under([replace(c.layout, shard_states=states) for c in made.components])
    return holdings(tensors.values(), made.placements, uniform.devices)


def kinds(
    uniform: UniformPartitions, degree: int, holding_of: Mapping[str, Holding]
) -> tuple[int, ...]:
    """Equal numbers for components that take the same: equal programs, traffic, own tensors."""
    numbers: dict[object, int] = {}
    kind_of = []
    for i, local in enumerate(uniform.partitions[degree].components):
        own = (holding_of[name] for name in uniform.own[i])
        tensors = tuple(replace(h, tensor=replace(h.tensor, name="")) for h in own)
        key = (local.program, local.layout, local.events[local.arrivals :], tensors)
        kind_of.append(numbers.setdefault(key, len(numbers)))
    return tuple(kind_of)
