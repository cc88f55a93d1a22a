"""A component's costs under a tensor degree: seconds and bytes of a micro-batch and a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from synchromesh.cost.planned_step import (
    collective_seconds,
    gradient_pattern,
    measured,
    shard_seconds,
)
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.trace.partition.local import Communication
from synchromesh.values import buckets
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Overlap, Pattern, Profile
from synchromesh.values.sharding import units


@dataclass(frozen=True)
class ComponentCosts:
    """What a component takes under one degree, in one micro-batch or once a step."""

    forward: float  # s of a micro-batch, blocking collectives included
    backward: float
    gradient: float  # s of traffic once a step, when the last backward is done
    gathered: float  # s in which its sharded parameters are gathered, ahead of its forward
    gathered_again: float  # s ahead of its backward
    taken: float  # s of computation that gradients cost besides, once a step
    update: float  # s of the optimizer's step
    resident: float  # bytes on a device: parameters, gradients, optimizer state
    kept: float  # bytes on a device from a micro-batch's forward to its backward
    working: float  # bytes on a device in a backward, of what was kept and of what it makes


def component_costs(
    uniform: UniformPartitions, degree: int, index: int, holding_of: Mapping[str, Holding],
    profile: Profile, ranks: Sequence[int] | None = None, recompute: bool = False,
) -> ComponentCosts:  # fmt: skip
    """On the slowest of `ranks` (None: all). Unmeasured where something of it is not known."""
    local = uniform.partitions[degree].components[index]
    local = replace(local, layout=replace(local.layout, recompute=recompute))
    program = measured(local, profile)
    layout = uniform.layout_of(degree, index)
    rows = max(1, -(-uniform.rows // layout.data))
    own = [holding_of[name] for name in uniform.own[index]]
    trained = [h for h in own if h.tensor.trainable]
    events = [e for e in local.events[local.arrivals :] if isinstance(e, Communication)]
    inside = [c for event in events for c in event.collectives]
    there, back = uniform.seconds(inside, layout, profile)  # blocking
    _, repeats = uniform.seconds(local.repeats, layout, profile)  # where it is recomputed
    gathers, again = (_Gathers.of(own, profile, backward) for backward in (False, True))
    reduced = _reduced(trained, uniform, profile)
    waited, scattered = _scattered(trained, profile)
    of_ranks = range(len(program.forward)) if ranks is None else ranks
    forward = max(program.forward[r](rows) for r in of_ranks)
    backward = max(program.backward[r](rows) for r in of_ranks) + recompute * forward
    forward += gathers.computing(profile)
    backward += again.computing(profile)
    gradient = reduced + scattered
    taken = _taken("all_reduce", reduced, profile)
    taken += _taken("reduce_scatter", scattered, profile)
    in_buckets = sum(h.local_bytes for h in trained) * (gradient > 0)
    kept_bytes = sum(h.kept_bytes for h in trained)
    return ComponentCosts(
        forward=forward + there, gradient=gradient,
        backward=backward + back + repeats + waited,
        gathered=gathers.seconds, gathered_again=again.seconds,
        taken=taken + profile.copy_byte * in_buckets,
        update=profile.update_byte * kept_bytes + profile.update_tensor * len(trained),
        resident=sum(_resident(h, profile) for h in own),
        kept=0.0 if recompute else program.memory.kept(rows),
        working=program.memory.backward(rows) + sum(map(_gathered_bytes, own)),
    )  # fmt: skip


@dataclass(frozen=True)
class _Gathers:
    """Parameters that are gathered ahead of a component, and copied to where it reads them."""

    seconds: float
    bytes: int

    @classmethod
    def of(cls, own: Sequence[Holding], profile: Profile, backward: bool = False) -> "_Gathers":
        """Those of forward; of backward those that were freed in between."""
        gathered = [unit.holdings for unit in units([own]) if not (backward and unit.lasting)]
        seconds = sum(shard_seconds("all_gather", held, profile) for held in gathered)
        return cls(seconds, sum(h.local_bytes for held in gathered for h in held))

    def computing(self, profile: Profile) -> float:
        return _taken("all_gather", self.seconds, profile) + profile.copy_byte * self.bytes


def _gathered_bytes(h: Holding) -> int:
    """Bytes that a sharded tensor takes besides while its component is at work: what that computes
    with, where it has not stayed, and a place in a bucket for its gradient."""
    if not h.scattered:
        return 0
    return h.local_bytes * ((h.states == "parameters") + h.tensor.trainable)


def _scattered(trained: Sequence[Holding], profile: Profile) -> tuple[float, float]:
    """Seconds of the reduce-scatters of its gradients: of those that backward waits for, as no
    more than so many buckets are under way, and of the others."""
    sharded = [h for h in trained if h.scattered]
    filled = buckets.fill(
        sharded, lambda h: (gradient_pattern(h), h.tensor.dtype), lambda h: h.local_bytes
    )
    seconds = [shard_seconds("reduce_scatter", bucket, profile) for bucket in filled]
    most = buckets.SIZES.under_way
    return sum(seconds[:-most]), sum(seconds[-most:])


def _taken(kind: str, seconds: float, profile: Profile) -> float:
    return seconds * (1.0 - profile.overlap.get(kind, Overlap()).compute)


def _resident(h: Holding, profile: Profile) -> float:
    """Bytes at the end of forward: sharded, what stays gathered counts, its gradient does not."""
    if not h.tensor.trainable:
        return h.kept_bytes
    lasting = h.scattered and h.states != "parameters"
    there = h.local_bytes if lasting else h.kept_bytes
    return (1.0 + profile.state_factor) * h.kept_bytes + there


def _reduced(trained: Sequence[Holding], uniform: UniformPartitions, profile: Profile) -> float:
    """Seconds of the all-reduces of its gradients; small ones ride in shared buckets."""
    sizes: dict[Pattern, int] = {}
    for h in trained:
        if not h.scattered:
            ranks = uniform.resized(gradient_pattern(h))
            sizes[ranks] = sizes.get(ranks, 0) + h.local_bytes

    def seconds(ranks: Pattern, size: float) -> float:
        return collective_seconds("all_reduce", ranks, size, profile)

    return sum(max(0.0, seconds(x, size) - seconds(x, 1e-9)) for x, size in sizes.items())
