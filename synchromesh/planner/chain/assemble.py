"""The planner's problem of a model: options and link prices, of uniform partitions and a profile.

For every tensor degree m of K devices the step is partitioned under K/m x m. Component i
under that degree is option m: what it computes and sends inside, as it stands in that partition.
What values between components cost is in `links`.

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

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from synchromesh.cost.planned_step import Unmeasured
from synchromesh.planner.chain.component_costs import ComponentCosts, component_costs
from synchromesh.planner.chain.links import crossing_values, prices_of
from synchromesh.planner.chain.problem import ChainPlan, Option, PricedEdge, Problem
from synchromesh.planner.chain.search import search
from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.uniform import UniformPartitions, holdings_of, kinds
from synchromesh.planner.wording import worded
from synchromesh.trace.partition.local import Partition
from synchromesh.values.holding import Holding
from synchromesh.values.layout import STATES, Layout, ShardStates
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class Assembled:
    """The problem of a model, and the layout that each option of its components stands for."""

    problem: Problem
    layouts: tuple[tuple[Layout, ...], ...]


Saving = tuple[ShardStates, bool]  # of memory: what is sharded, whether it is recomputed
AS_IS: tuple[Saving, ...] = (("none", False),)


def levels(micro_batches: int) -> tuple[ShardStates, ...]:
    """Every level of sharding that frees more than the one before; gradients of one micro-batch
    are sharded when they are there, whatever the level."""
    return tuple(s for s in STATES if s != "gradients" or micro_batches > 1)


SAVINGS: tuple[Saving, ...] = tuple(product(levels(1), (False, True)))  # one is all searches know


def assemble(
    uniform: UniformPartitions, profile: Profile, savings: Sequence[Saving] = AS_IS
) -> Assembled:
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
        offered = offers.options(i, savings)
        if not offered:
            name = uniform.step.chain.names[i]
            raise Unmeasured(f"no layout of {name} could be measured")
        options = tuple(offered.values())
        components.append(known.setdefault(options, options))
        layouts.append(tuple(offered))
    values = crossing_values(uniform)
    links = zip(values, prices_of(uniform, values, profile), strict=True)
    priced = tuple(PricedEdge(v.source, v.readers, prices) for v, prices in links)
    return Assembled(Problem(tuple(components), priced), tuple(layouts))


@dataclass(frozen=True)
class _Offers:
    uniform: UniformPartitions
    holding_of: Mapping[tuple[int, ShardStates], Mapping[str, Holding]]  # by degree and states
    profile: Profile
    _kinds: dict[tuple[int, ShardStates], tuple[int, ...]] = field(default_factory=dict)
    _known: dict[tuple[int, int, Saving], ComponentCosts | None] = field(default_factory=dict)

    @cached_property
    def first(self) -> Mapping[int, Mapping[str, int]]:
        """By degree: the first component that reads a value of another one."""
        firsts: dict[int, dict[str, int]] = {}
        for m, made in self.uniform.partitions.items():
            for i, local in enumerate(made.components):
                for item in local.inputs:
                    firsts.setdefault(m, {}).setdefault(item.value.name, i)
        return firsts

    def layout(self, degree: int, index: int, saving: Saving) -> Layout:
        layout, (states, recompute) = self.uniform.layout_of(degree, index), saving
        states = states if layout.data > 1 else "none"
        return replace(layout, shard_states=states, recompute=recompute)

    def options(self, index: int, savings: Sequence[Saving]) -> dict[Layout, Option]:
        uniform = self.uniform
        offered = [m for m in uniform.degrees if uniform.offers(m, index)]
        return {
            self.layout(m, index, saving): option
            for m in offered
            if len(offered) == 1 or _sharded(uniform.partitions[m], index)
            for saving in savings
            if (option := self.option(m, index, saving)) is not None
        }

    def option(self, degree: int, index: int, saving: Saving) -> Option | None:
        """The component under one degree; None where nothing is known of it."""
        uniform, (_, recompute) = self.uniform, saving
        own = self._costs(degree, index, saving)
        if own is None:
            return None
        waits = self._waits(degree, index, saving, own)
        last = index == len(uniform.step.chain.components) - 1
        alive = max(own.kept, own.working) if last else own.kept
        return Option(
            forward=own.forward + waits[0],
            backward=own.backward + own.taken + waits[1],
            gradient=own.gradient, update=own.update, border=uniform.degrees.index(degree),
            memory=round(own.resident + alive + self._inputs(degree, index, recompute)),
        )  # fmt: skip

    def _costs(self, degree: int, index: int, saving: Saving) -> ComponentCosts | None:
        states, recompute = saving
        held = self.holding_of[degree, states]
        if (degree, states) not in self._kinds:
            self._kinds[degree, states] = kinds(self.uniform, degree, held)
        key = (degree, self._kinds[degree, states][index], saving)
        if key not in self._known:
            with suppress(Unmeasured):
                self._known[key] = component_costs(
                    self.uniform, degree, index, held, self.profile, recompute=recompute
                )
        return self._known.setdefault(key, None)

    def _waits(
        self, degree: int, index: int, saving: Saving, own: ComponentCosts
    ) -> tuple[float, float]:
        """Seconds for which forward and backward wait for sharded parameters, which are gathered
        while the neighbour computes, in backward behind the gradients of the one before it; as if
        the neighbours had the same layout.

            forward    ( gather_i - forward_(i-1) )+
            backward   ( gather_i + gradient_(i+2) - backward_(i+1) )+"""
        count = len(self.uniform.step.chain.components)

        def near(place: int) -> ComponentCosts | None:
            return self._costs(degree, place, saving) if 0 <= place < count else None

        before, behind, further = (near(index + step) for step in (-1, 1, 2))
        forward = own.gathered - (before.forward if before else 0.0)
        backward = own.gathered_again - (behind.backward if behind else 0.0)
        backward += further.gradient if further and own.gathered_again else 0.0
        return max(0.0, forward), max(0.0, backward)

    def _inputs(self, degree: int, index: int, recompute: bool) -> float:
        """Bytes of values of other components that it keeps for backward and is first to read."""
        local = self.uniform.partitions[degree].components[index]
        kept = self.profile.compute[local.program].memory.kept_inputs
        rows = -(-self.uniform.rows // self.uniform.layout_of(degree, index).data)
        total = 0.0
        for number, item in enumerate(local.inputs):
            first = self.first[degree][item.value.name] == index
            if first and item.source is not None and (recompute or number in kept):
                value, share = item.value, local.layout.tensor if item.want.sharded else 1
                size = item.want.padded_bytes(value.bytes(1), value.shape, local.layout.tensor)
                total += size / share * (rows**value.rows.power if value.rows else 1.0)
        return total


def _sharded(made: Partition, index: int) -> bool:
    """Whether the degree shards any parameter of the component; true if there is none to shard."""
    local = made.components[index]
    sharded = [made.placements[n, local.layout].sharded for n in local.parameters]
    return local.layout.tensor == 1 or not sharded or any(sharded)


@dataclass(frozen=True)
class ChainSearch:
    assembled: Assembled
    limit: float  # bytes of a device
    best: ChainPlan

    @classmethod
    def of(
        cls, uniform: UniformPartitions, profile: Profile, limit: float,
        savings: Sequence[Saving] = AS_IS, alternatives: int = 4,
    ) -> "ChainSearch":  # fmt: skip
        """The search over the degrees of `uniform`, with at most `limit` bytes on a device.
        savings: in which ways each component may save memory. alternatives: plans that are priced
        exactly besides the best, where none saves memory: those save a little more or less. Their
        number is chosen, not measured. Unmeasured where the profile lacks every layout of a
        component."""
        assembled = assemble(uniform, profile, savings)
        most = alternatives if savings == AS_IS else 0
        return cls(assembled, limit, search(assembled.problem, limit, most))

    def plans(self, planned: PlanningProblem) -> list[Plan]:
        every = (self.best, *self.best.alternatives)
        layouts = (self.layouts(plan.choice) for plan in every)
        return [worded(planned.names, x, planned.modules, planned.step.coupling) for x in layouts]

    def layouts(self, choice: Sequence[int]) -> tuple[Layout, ...]:
        return tuple(layouts[k] for layouts, k in zip(self.assembled.layouts, choice, strict=True))

    def choice(self, planned: PlanningProblem, plan: Plan) -> tuple[int, ...] | None:
        """The options that are the plan's layouts; None where one of them was not offered."""
        if len(planned.ranks(plan)) != planned.devices or plan.stages:
            return None
        wanted, offered = planned.layouts(plan), self.assembled.layouts
        if not all(layout in layouts for layout, layouts in zip(wanted, offered, strict=True)):
            return None
        return tuple(layouts.index(x) for x, layouts in zip(wanted, offered, strict=True))
