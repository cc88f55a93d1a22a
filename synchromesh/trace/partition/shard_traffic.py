"""What sharded states send in a step: parts of parameters that are gathered, gradients that are
scattered."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from synchromesh.values.holding import Holding
from synchromesh.values.layout import groups_of, stages_of
from synchromesh.values.schedule import ActionKind, pipeline
from synchromesh.values.sharding import Gathering, gathering, units
from synchromesh.values.traffic import Collective, CollectiveKind, Direction

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
    found = gathering_of(made, held)
    here = {of[n] for n, stage in enumerate(stages) if position in layouts[stage[0]].positions}
    if not found.units or not here:
        return ()
    (group,) = here
    actions = pipeline(schedule, of, micro_batches).groups[group]
    runs = [found.run(stages[a.stage], a.kind == "B") for a in actions]
    places = [
        (i, _DIRECTIONS[a.kind]) for a, run in zip(actions, runs, strict=True) for i, _ in run
    ]
    gathers: Counter[tuple[int, Direction, int]] = Counter()
    for place, use in zip(places, found.uses(runs), strict=True):
        gathers.update((*place, unit) for unit in use.gathered)
    traffic = [
        ShardTraffic(
            i, _collective("all_gather", direction, found.units[unit].holdings, position), n
        )
        for (i, direction, unit), n in gathers.items()
    ]
    backwards = Counter(a.stage for a in actions if a.kind == "B")
    stage_of = {i: number for number, stage in enumerate(stages) for i in stage}
    for number, unit in enumerate(found.units):
        trained = tuple(h for h in unit.holdings if h.tensor.trainable)
        first = next(i for i, needed in enumerate(found.needed) if number in needed)
        if trained and position in trained[0].positions:
            times = backwards[stage_of[first]] if trained[0].each_backward else 1
            collective = _collective("reduce_scatter", "gradient", trained, position)
            traffic.append(ShardTraffic(first, collective, times))
    return tuple(traffic)


def _collective(
    kind: CollectiveKind, direction: Direction, held: Sequence[Holding], position: int
) -> Collective:
    """Over parts that are all as long as the largest one."""
    first, parts = held[0], held[0].parts
    size = parts * sum(h.part_bytes_at(position) for h in held)
    stride = first.gradient_layout.tensor
    return Collective(kind, direction, parts, fixed_bytes=size, stride=stride)
