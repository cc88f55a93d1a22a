"""What sharded states send in a step: parts of parameters that are gathered, gradients that are
scattered."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from synchromesh.values.buckets import completing
from synchromesh.values.holding import Holding
from synchromesh.values.layout import groups_of, stages_of
from synchromesh.values.schedule import Action, ActionKind, pipeline
from synchromesh.values.sharding import Gathering, gathering, units
from synchromesh.values.synchronisation import Synchronisation
from synchromesh.values.traffic import Collective, CollectiveKind, Direction

from .local import Partition, flow

_DIRECTIONS: dict[ActionKind, Direction] = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class ShardTraffic:
    """A collective of a component, by its place in the chain, and how often a step has it, of so
    many steps (`every`)."""

    component: int
    collective: Collective
    times: int
    every: int = 1


def gathering_of(made: Partition, held: Mapping[str, Holding]) -> Gathering:
    """The units of sharded parameters, and which components need them."""
    parameters = ([held[p.name] for p in c.component.parameters] for c in made.components)
    return gathering(units(parameters), map(flow, made.components))


def served_traffic(
    made: Partition, held: Mapping[str, Holding], sync: Synchronisation, position: int
) -> tuple[ShardTraffic, ...]:
    """What the device at a position sends of gradients and parameters where workers go on without
    each other, who make as many steps."""
    sent: list[ShardTraffic] = []
    known: set[str] = set()
    for i, local in enumerate(made.components):
        own = [held[p.name] for p in local.component.parameters if p.name not in known]
        own = [h for h in own if h.replica and position in h.positions]
        known.update(h.tensor.name for h in own)
        sizes = [_served(h, position) for h in own]
        pushed, fetched = sum(push for push, _ in sizes), sum(fetch for _, fetch in sizes)
        each: list[tuple[Direction, int, int]]
        each = [("gradient", pushed, sync.push), ("parameters", fetched, sync.between_fetches)]
        for direction, size, every in each if own else ():
            workers = local.layout.data
            collective = Collective("send", direction, workers, fixed_bytes=size)
            sent.append(ShardTraffic(i, collective, 1, every))
    return tuple(sent)


def _served(holding: Holding, position: int) -> tuple[int, int]:
    """Bytes that a position sends in a push and in a fetch. Of what all tensor ranks of a worker
    have, the first one tells the others."""
    ranks = holding.sharing(position)
    if position not in ranks:
        return 0, 0
    part, index = holding.part_bytes_at(position), ranks.index(position)
    assert holding.serving is not None, "a replica is of what servers keep"
    pushed, fetched = holding.serving.sent(part, index, len(ranks))
    others = 0 if holding.placement.sharded else holding.layout.tensor - 1
    return pushed, fetched + others * holding.local_bytes


def shard_traffic(
    made: Partition, held: Mapping[str, Holding], schedule: str, micro_batches: int, position: int
) -> tuple[ShardTraffic, ...]:
    """What the device at a position takes part in, in a step of so many micro-batches."""
    layouts = [local.layout for local in made.components]
    of, stages = groups_of(layouts), stages_of(layouts)
    gathering = gathering_of(made, held)
    here = {of[n] for n, stage in enumerate(stages) if position in layouts[stage[0]].positions}
    if not gathering.units or not here:
        return ()
    (group,) = here
    actions = pipeline(schedule, of, micro_batches).groups[group]
    return (
        *_gathered(gathering, actions, stages, position),
        *_scattered(gathering, actions, stages, position),
    )


def _gathered(
    gathering: Gathering, actions: Sequence[Action], stages: Sequence[range], position: int
) -> list[ShardTraffic]:
    uses = gathering.uses(actions, stages)
    gathers: Counter[tuple[int, Direction, int]] = Counter()
    for (action, i), use in zip(uses.places, uses.uses, strict=True):
        gathers.update((i, _DIRECTIONS[action.kind], unit) for unit in use.gathered)
    return [
        ShardTraffic(
            i, _collective("all_gather", direction, gathering.units[unit].holdings, position), n
        )
        for (i, direction, unit), n in gathers.items()
    ]


def _scattered(
    gathering: Gathering, actions: Sequence[Action], stages: Sequence[range], position: int
) -> list[ShardTraffic]:
    stage_of = {i: number for number, stage in enumerate(stages) for i in stage}
    trained: dict[str, tuple[Holding, ...]] = {}  # of each unit, by the name of its first
    users: dict[str, tuple[int, int]] = {}
    for unit, first in zip(gathering.units, gathering.first_users, strict=True):
        its = tuple(h for h in unit.holdings if h.tensor.trainable)
        if its and position in its[0].positions:
            name = its[0].tensor.name
            trained[name], users[name] = its, (stage_of[first], first)
    each = {name for name, its in trained.items() if its[0].each_backward}
    sums = Counter[str]()
    for by_component in completing(actions, users, each).values():
        sums.update(chain.from_iterable(by_component.values()))
    return [
        ShardTraffic(
            users[name][1], _collective("reduce_scatter", "gradient", its, position), sums[name]
        )
        for name, its in trained.items()
    ]


def _collective(
    kind: CollectiveKind, direction: Direction, held: Sequence[Holding], position: int
) -> Collective:
    """Over parts that are all as long as the largest one."""
    first, parts = held[0], held[0].parts
    size = sum(h.part_bytes_at(position) for h in held)
    stride = first.gradient_layout.tensor
    if first.serving is not None:
        ranks = first.sharing(position)
        sent = first.serving.sent(size, ranks.index(position), len(ranks))
        return Collective("send", direction, len(ranks), fixed_bytes=sent[kind == "all_gather"])
    return Collective(kind, direction, parts, fixed_bytes=parts * size, stride=stride)
