"""A planned step: a step as a plan would run it, of which seconds and bytes are predicted.

It knows the partition, where tensors lie, the rows, the schedule, and what a profile says of it.

A schedule (values/schedule.py) says in which order the turns of all micro-batches run, in which
one computes and sends between two pauses:

    turn 0    compute ... depart |  turn 1    arrive compute ... depart |  turn 2    arrive ...

Backward goes through each turn in reverse: an arrival becomes a departure, a departure an arrival.
What comes from another stage is a message of the schedule (values/messages.py), no part of a turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from synchromesh.trace.partition.local import (
    Communication,
    Computation,
    LocalComponent,
    Partition,
    crossings,
)
from synchromesh.trace.partition.shard_traffic import gathering_of
from synchromesh.values.exchange import Exchange
from synchromesh.values.holding import Holding, averaged
from synchromesh.values.layout import Layout, groups_of, stages_of
from synchromesh.values.messages import Instruction, instructions
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Pattern, Profile
from synchromesh.values.schedule import Action, Schedule, pipeline, taking_turns
from synchromesh.values.sharding import Gathering
from synchromesh.values.synchronisation import Synchronisation
from synchromesh.values.traffic import Collective, Servers


class Unmeasured(ValueError):
    """The profile lacks a program or a collective that a plan would run."""


@dataclass(frozen=True)
class ComputeShare:
    """A share of what a component computes."""

    component: int
    share: float  # of its seconds


@dataclass(frozen=True)
class Transmit:
    """A communication of a component departs, or is waited for."""

    component: int
    number: int  # among the component's events
    communication: Communication
    departs: bool  # in forward


Turn = tuple[ComputeShare | Transmit, ...]


def turns_of(components: Sequence[LocalComponent], first: int = 0) -> tuple[Turn, ...]:
    """The turns of one micro-batch's forward through the components of a stage. first: the place
    of the first of them in the chain."""
    turns: list[list[ComputeShare | Transmit]] = [[]]
    for i, local in enumerate(components, first):
        total = sum(e.work for e in local.events if isinstance(e, Computation))
        if not total:
            turns[-1].append(ComputeShare(i, 1.0))
        for number, event in enumerate(local.events):
            if isinstance(event, Computation):
                turns[-1].append(ComputeShare(i, event.work / total))
                continue
            if any(c.kind == "send" for c in event.collectives):
                continue
            turns[-1].append(Transmit(i, number, event, True))
            if event.pauses:
                turns.append([])
            turns[-1].append(Transmit(i, number, event, False))
    return tuple(map(tuple, turns))


def walked(turns: Sequence[Turn], action: Action) -> Iterable[ComputeShare | Transmit]:
    """What an action does, in order; a backward undoes what its forward did. The gradients of
    weights alone send nothing."""
    turn = turns[action.turn]
    if action.kind == "W":
        return (item for item in reversed(turn) if isinstance(item, ComputeShare))
    return turn if action.kind == "F" else reversed(turn)


@dataclass(frozen=True)
class PlannedStep:
    """A plan as it would run: its partition, where tensors lie, the rows of a step."""

    partition: Partition
    holdings: Mapping[str, Holding]
    plan: Plan
    devices: int
    rows: int
    overlaps: bool = False  # whether its rows may be cut into pieces that take turns

    @cached_property
    def shortened(self) -> "PlannedStep":
        """With no more micro-batches than tell what is alive: on one stage those between the first
        and the last, which sends what is summed, do alike. A pipeline without a flush has as many
        under way as stages whatever a step has."""
        plan, enough = self.plan, 3
        if plan.kept:
            return self.of_micro_batches(max(plan.micro_batches, plan.stage_count))
        if len(self.stages) > 1 or plan.micro_batches <= enough or plan.default.microbatches:
            return self
        return self.of_micro_batches(enough)

    def of_micro_batches(self, count: int) -> "PlannedStep":
        """With as many micro-batches, as large as they are."""
        plan, rows = self.plan, count * -(-self.rows // self.plan.micro_batches)
        default = replace(plan.default, microbatches=None)
        return replace(self, plan=replace(plan, default=default, micro_batches=count), rows=rows)

    @cached_property
    def ranks(self) -> Sequence[int]:
        """The rank at each position."""
        return self.plan.order(self.devices)[: self.devices]

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The components of each stage."""
        return stages_of([local.layout for local in self.partition.components])

    @cached_property
    def of(self) -> tuple[int, ...]:
        """The device group of each stage."""
        return groups_of([local.layout for local in self.partition.components])

    @cached_property
    def positions(self) -> tuple[range, ...]:
        """The positions of each device group."""
        of_stages = {self.partition.components[stage[0]].layout.positions for stage in self.stages}
        return tuple(sorted(of_stages, key=lambda positions: positions.start))

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """What one micro-batch does in forward, by stage; where there are several, in one turn."""
        parts = self.partition.components
        by_stage = [turns_of(parts[s.start : s.stop], s.start) for s in self.stages]
        if len(self.stages) == 1:
            return tuple(by_stage)
        return tuple((tuple(item for turn in turns for item in turn),) for turns in by_stage)

    @cached_property
    def divides(self) -> bool:
        """Whether the gradients of weights have actions of their own."""
        return self.schedule(1).divides

    @cached_property
    def crossings(self) -> Mapping[tuple[int, int], tuple[Exchange, ...]]:
        """What goes from stage to stage."""
        return crossings(self.partition)

    @cached_property
    def gathering(self) -> Gathering:
        """The units of sharded parameters, and which components need them."""
        return gathering_of(self.partition, self.holdings)

    def stages_on(self, group: int) -> list[int]:
        return [stage for stage, its in enumerate(self.of) if its == group]

    def components(self, group: int) -> list[int]:
        """The components of a device group, by their place in the chain."""
        return [i for stage in self.stages_on(group) for i in self.stages[stage]]

    def held(self, position: int) -> list[Holding]:
        """Those that have something at a position."""
        return [h for h in self.holdings.values() if position in h.positions]

    def kept(self, position: int) -> list[Holding]:
        """Those of which a position keeps something."""
        return [h for h in self.held(position) if h.kept_at(position)]

    def stashed_bytes(self, position: int) -> int:
        """Of versions of parameters that a position keeps besides the newest one, at most."""
        kept = self.plan.kept
        if kept is None:
            return 0
        stage = next(s for s, g in enumerate(self.of) if position in self.positions[g])
        trained = (h for h in self.held(position) if h.tensor.trained)
        return kept.behind(stage) * sum(h.bytes_at(position) for h in trained)

    def trained(self, component: int) -> list[Holding]:
        """Where the parameters of a component lie that are trained."""
        parameters = self.partition.components[component].component.parameters
        return [
            self.holdings[p.name] for p in parameters if p.trainable and p.name in self.holdings
        ]

    def schedule(self, pieces: int) -> Schedule:
        """The order of a step; pieces: how many pieces take turns on the only stage."""
        count = self.plan.micro_batches
        if len(self.stages) == 1:
            return taking_turns(count * pieces, len(self.turns[0]), pieces)
        assert pieces == 1, "micro-batches of a pipeline take no turns"
        return pipeline(self.plan.schedule, self.of, count)

    def instructions(self, pieces: int) -> tuple[tuple[Instruction, ...], ...]:
        """What each device group does, in its order."""
        return instructions(self.schedule(pieces), frozenset(self.crossings))

    def actions(self, group: int, pieces: int) -> tuple[Action, ...]:
        """What a device group runs, in its order; those that take turns as one micro-batch."""
        actions = self.schedule(pieces).groups[group]
        return tuple(dict.fromkeys(action.of_all(pieces) for action in actions))

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Rows that each data index has of one of the plan's micro-batches, of the largest where
        they differ; a rank without rows computes one that does not count."""
        if layout.data not in self._blocks:
            ranges = self.row_ranges(layout.data)
            self._blocks[layout.data] = tuple(max(1, b - a) for a, b in ranges)
        return self._blocks[layout.data]

    def row_ranges(self, data: int) -> tuple[tuple[int, int], ...]:
        """The rows [start, stop) of that micro-batch by data index, of a data degree."""
        if data not in self._ranges:
            largest = -(-self.rows // self.plan.micro_batches)
            self._ranges[data] = self.plan.row_ranges(largest, data)
        return self._ranges[data]

    @cached_property
    def _ranges(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {}

    @cached_property
    def _blocks(self) -> dict[int, tuple[int, ...]]:
        return {}


def measured(local: LocalComponent, profile: Profile) -> Compute:
    """What was measured of a component. Unmeasured: where nothing was."""
    key = local.program
    if key not in profile.compute:
        raise Unmeasured(f"{local.component.name} ({local.layout}) was not measured")
    return profile.compute[key]


def pattern(collective: Collective) -> Pattern:
    """The groups of ranks on which a collective runs."""
    return Pattern(collective.ranks, collective.stride)


def gradient_pattern(holding: Holding) -> Pattern:
    """The groups of ranks over which a parameter's gradient is summed."""
    layout = holding.gradient_layout
    return Pattern(layout.data, layout.tensor)


def shard_seconds(kind: str, held: Sequence[Holding], profile: Profile) -> float:
    """Seconds to gather the parts of parameters, or to scatter their gradients."""
    ranks, payload = gradient_pattern(held[0]), sharded_bytes(held)
    if (serving := held[0].serving) is not None:
        return served_seconds(payload / serving.count, serving, ranks.size, profile)
    return collective_seconds(kind, ranks, payload, profile)


def served_seconds(part: float, servers: Servers, ranks: int, profile: Profile) -> float:
    """Seconds of a push or a fetch of parts of so many bytes: of what goes through a server's link
    in its busier direction, with N ranks N - 1 parts, or W with W workers to a dedicated one, as
    messages; of sums of a push and of the next fetch of S servers on workers, N + S - 2."""
    workers = ranks - servers.first
    if servers.dedicated or servers.count == ranks:
        parts = workers - (not servers.dedicated)
    else:
        parts = ranks + servers.count - 2
    return message_seconds(parts * part, profile)


def message_seconds(size: float, profile: Profile) -> float:
    return collective_seconds("send", Pattern(2), size, profile)


def sharded_bytes(held: Sequence[Holding]) -> int:
    """Bytes of what is gathered or scattered: every part as long as the largest one."""
    return sum(h.parts * h.kept_bytes for h in held)


def bytes_apart(
    planned: PlannedStep, position: int, state_factor: float
) -> tuple[float, float, float]:
    """Bytes of parameters, of states and of messages that a rank has of its own, besides what is
    kept: what a worker computes with where servers keep that, with the states of its own steps;
    older versions; where an outer step begins, and its momentum. A server has a gradient that
    comes, and what it has last answered each other worker."""
    held, sync = planned.held(position), planned.plan.sync
    replicas = float(sum(h.local_bytes for h in held if h.replica))
    outer = 2.0 * sum(h.kept_bytes for h in held if h.alone) * sync.outer_step
    states = outer + state_factor * replicas * sync.steps_itself
    messages = 0.0
    for h in (h for h in held if h.replica):
        serves, first = h.kept_at(position), h.serving.first if h.serving else 0
        others = len(h.sharing(position)) - max(first, serves)
        waiting = h.parts if sync.push > 1 and not (serves and first) else 0  # to be pushed
        messages += h.kept_bytes * ((1 + others) * serves + waiting)
    return replicas + planned.stashed_bytes(position), states, messages


def link_seconds(planned: PlannedStep, profile: Profile) -> float:
    """Seconds of a step in which a server's link is busy for asynchronous workers; no step of
    theirs is shorter, on average."""
    sync = planned.plan.sync
    return max((_link_seconds(its, sync, profile) for its in _replicas(planned)), default=0.0)


def _replicas(planned: PlannedStep) -> Iterable[list[Holding]]:
    """Of each stage what asynchronous workers have replicas of."""
    stages: dict[range, list[Holding]] = {}
    for h in (h for h in planned.holdings.values() if h.replica):
        stages.setdefault(h.layout.positions, []).append(h)
    return stages.values()


def exchange_seconds(planned: PlannedStep, profile: Profile) -> float:
    """Seconds of a step, on average, for what workers that step alone send: means of parameters,
    or gradients to servers and parameters back."""
    sync = planned.plan.sync
    if sync.asynchronous:
        its = _replicas(planned)
        return max((_served_seconds(held, sync, profile) for held in its), default=0.0)
    if not sync.steps:
        return 0.0
    seconds: dict[range, float] = {}  # by stage, whose ranks do it at once
    for bucket in averaged(planned.holdings.values()):
        size, layout = sum(h.local_bytes for h in bucket), bucket[0].layout
        ranks = Pattern(layout.data, layout.tensor)
        copied = 2 * profile.copy_byte * size  # to where it is sent, and back
        taken = collective_seconds("all_reduce", ranks, size, profile) + copied
        seconds[layout.positions] = seconds.get(layout.positions, 0.0) + taken
    return max(seconds.values(), default=0.0) / sync.steps


def _served_seconds(held: Sequence[Holding], sync: Synchronisation, profile: Profile) -> float:
    """Of a worker's push and fetch, which it waits for."""
    size = sum(h.local_bytes for h in held)
    one = message_seconds(size, profile) + profile.copy_byte * size
    return one / sync.push + one / sync.between_fetches


def _link_seconds(held: Sequence[Holding], sync: Synchronisation, profile: Profile) -> float:
    """Of what all workers push through a server's link while each makes a step, or fetch."""
    serving = held[0].serving
    assert serving is not None, "a replica is of what servers keep"
    ranks = held[0].layout.data - (serving.first or 1)
    part = sum(h.kept_bytes for h in held)
    return message_seconds(ranks * part, profile) / min(sync.push, sync.between_fetches)


def collective_seconds(kind: str, ranks: Pattern, payload: float, profile: Profile) -> float:
    """Seconds of one collective, all groups of its pattern at once."""
    if ranks.size == 1 or payload <= 0:
        return 0.0
    curve = profile.network.get((kind, ranks))
    if curve is None:
        raise Unmeasured(f"{kind} on {ranks.size} ranks (stride {ranks.stride}) was not measured")
    return curve(payload)


def update_seconds(
    planned: PlannedStep, profile: Profile, positions: Sequence[int],
    ranks: Sequence[int] | None = None,
) -> float:  # fmt: skip
    """Seconds of the optimizer's step at these positions, on the slowest of `ranks`, or of
    theirs; it was measured on all's."""
    ranks = [planned.ranks[p] for p in positions] if ranks is None else ranks
    trained = [h for h in planned.held(positions[0]) if h.tensor.trainable]
    byte, tensor = profile.update_byte, profile.update_tensor
    slowest = byte * sum(h.kept_bytes for h in trained) + tensor * len(trained)
    return slowest * profile.relative_slowdown(ranks)
