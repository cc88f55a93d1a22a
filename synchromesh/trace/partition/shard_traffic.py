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
from synchromesh.values.traffic import Collective, CollectiveKind, Direction, served_bytes

from .local import Partition, flow

_DIRECTIONS: dict[ActionKind, Direction] = {"F": "forward", "B": "backward"}


@dataclass(frozen=True)
class ShardTraffic:
    """A collective of a component, by its place in the chain, and how often a step has it."""

    component: int
    collective: Collective
    times: int


def gathering_of(made: Partition, held: Mapping[str, Holding]) -> Gathering:
    """The units of sharded parameters, and which components need them."""
    parameters = ([held[p.name] for p in c.component.parameters] for c in made.components)
    return gathering(units(parameters), map(flow, made.components))


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
    if first.servers:
        ranks = first.sharing(position)
        sent = served_bytes(size, parts, ranks.index(position), len(ranks))
        return Collective("send", direction, len(ranks), fixed_bytes=sent[kind == "all_gather"])
    return Collective(kind, direction, parts, fixed_bytes=parts * size, stride=stride)
