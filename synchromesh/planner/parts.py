"""The parts of what a component takes under a tensor degree: seconds and bytes, of a micro-batch
and of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from synchromesh.cost.step_time import Unmeasured, collective_seconds, gradient_pattern
from synchromesh.planner.uniform import DIRECTIONS, Uniform, seconds_of
from synchromesh.trace.partition.local import Communication, LocalComponent
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Overlap, Pattern, Profile


@dataclass(frozen=True)
class Parts:
    """What a component takes under one degree, in one micro-batch or once a step."""

    forward: float  # s of a micro-batch, blocking collectives included
    backward: float
    gradient: float  # s of traffic once a step, when the last backward is done
    taken: float  # s of computation that gradients cost besides, once a step
    update: float  # s of the optimizer's step
    resident: float  # bytes on a device: parameters, gradients, optimizer state
    kept: float  # bytes on a device from a micro-batch's forward to its backward


def parts(
    uniform: Uniform,
    degree: int,
    index: int,
    holding_of: Mapping[str, Holding],
    profile: Profile,
    ranks: Sequence[int] | None = None,
) -> Parts | None:
    """What the component takes under one degree on the slowest of `ranks` (None: all); None where
    nothing is known of it."""
    made = uniform.partitions[degree]
    local = made.components[index]
    measured = profile.compute.get(made.program(local))
    if measured is None:
        return None
    layout = uniform.layout(degree) if uniform.offers(degree, index) else local.layout
    rows = max(1, -(-uniform.rows // layout.data))
    communications = [e for e in local.events[local.arrivals :] if isinstance(e, Communication)]
    inside = [c for communication in communications for c in communication.collectives]
    try:
        sent = {d: seconds_of(uniform, inside, layout, d, profile) for d in DIRECTIONS}
        traffic = _gradient(local, index, uniform, holding_of, profile)
    except Unmeasured:
        return None
    own = _own(local, index, uniform, holding_of)
    trained = sum(h.local_bytes for h in own if h.tensor.trainable)
    count = sum(h.tensor.trainable for h in own)
    frozen = sum(h.local_bytes for h in own if not h.tensor.trainable)
    of_ranks = range(len(measured.forward)) if ranks is None else ranks
    beside = 1.0 - profile.overlap.get("all_reduce", Overlap()).compute
    return Parts(
        forward=max(measured.forward[r](rows) for r in of_ranks) + sent["forward"],
        backward=max(measured.backward[r](rows) for r in of_ranks) + sent["backward"],
        gradient=traffic,
        taken=beside * traffic + profile.copy_byte * trained * (traffic > 0),
        update=profile.update_byte * trained + profile.update_tensor * count,
        resident=(2.0 + profile.state_factor) * trained + frozen,
        kept=measured.memory.kept(rows),
    )


def _own(
    local: LocalComponent, index: int, uniform: Uniform, holding_of: Mapping[str, Holding]
) -> list[Holding]:
    """Tensors that this component is the first to use."""
    chain = uniform.step.chain.components
    before = {t.name for c in chain[:index] for t in (*c.parameters, *c.buffers)}
    tensors = (*local.component.parameters, *local.component.buffers)
    return [holding_of[t.name] for t in tensors if t.name not in before]


def _gradient(
    local: LocalComponent,
    index: int,
    uniform: Uniform,
    holding_of: Mapping[str, Holding],
    profile: Profile,
) -> float:
    """Seconds of the all-reduces of its gradients; small ones ride in shared buckets."""
    sizes: dict[Pattern, int] = {}
    for h in _own(local, index, uniform, holding_of):
        if h.tensor.trainable:
            ranks = uniform.resized(gradient_pattern(h))
            sizes[ranks] = sizes.get(ranks, 0) + h.local_bytes
    return sum(
        max(0.0, collective_seconds("all_reduce", ranks, size, profile) - _latency(ranks, profile))
        for ranks, size in sizes.items()
    )


def _latency(ranks: Pattern, profile: Profile) -> float:
    return collective_seconds("all_reduce", ranks, 1e-9, profile)
