"""The cost of a move: what every rank lacks of what it will hold, at the links' rate.

    seconds  =  (most bytes that a rank receives) at the rate of an all-reduce on all ranks

An all-reduce of n bytes on K ranks has each of them receive 2 (K - 1) / K n bytes."""

from math import prod

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.values.boxes import intersection, volume
from synchromesh.values.holding import Holding
from synchromesh.values.profile import Pattern, Profile


def most_received(
    before: PlannedStep, after: PlannedStep, ranks: int, factor: float = 1.0
) -> float:
    """The most bytes that one of `ranks` ranks receives; factor: of a tensor and its optimizer
    state, for each byte of the tensor."""
    return max(
        sum(
            factor * lacking(before.holdings.get(name), new, _place(before, r), _place(after, r))
            for name, new in after.holdings.items()
        )
        for r in range(ranks)
    )


def _place(planned: PlannedStep, rank: int) -> int | None:
    """The rank's position; None where it is idle."""
    ranks = list(planned.ranks)
    return ranks.index(rank) if rank in ranks else None


def lacking(old: Holding | None, new: Holding, was: int | None, will: int | None) -> int:
    """Bytes of a tensor that a position lacks: of what it will hold, what it does not hold yet."""
    if will is None:
        return 0
    have = () if old is None or was is None else old.boxes(was)
    wanted = new.boxes(will)
    there = [x for a in wanted for b in have if (x := intersection(a, b)) is not None]
    elements = sum(map(volume, wanted)) - sum(map(volume, there))
    return elements * (new.tensor.bytes // max(1, prod(new.tensor.shape)))


def transfer_seconds(moved: float, ranks: int, profile: Profile) -> float:
    """Seconds in which a rank receives `moved` bytes. Where no all-reduce on all ranks was
    measured, the slowest curve of what was stands for it."""
    curve = profile.network.get(("all_reduce", Pattern(ranks)))
    curves = profile.network.values() if curve is None else [curve]
    payload = moved * ranks / (2 * max(1, ranks - 1))
    return max((c(payload) for c in curves), default=0.0) if moved else 0.0
