"""The recall of a profile: found by rank 0, told to all, sampled on them; kept when it has grown.

    circumstances -> file (rank 0) -> all ranks -> sampled -> curves scaled, or parts left out

What is sampled is a few programs, every kind of collective and every pattern (`look.again`): where
they take about what they did, curves are scaled by what they take now. Where they are far off, a
profile of another day tells too little, and compute or network is measured anew.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from synchromesh.engine.groups import World
from synchromesh.profiling.cache import Cache, Kept
from synchromesh.profiling.facts import Subject, facts
from synchromesh.profiling.profile_key import circumstances
from synchromesh.profiling.reprofile import again
from synchromesh.trace.partition.local import Partition
from synchromesh.values.profile import Profile

FAR = 1.5  # times as slow or as quick as before, from where curves are not scaled
LOOKS = 2  # samples that must say so: something else may have run beside the first
SLACK = 1e-4  # seconds that calls differ by on any day
Say = Callable[[str], None]


@dataclass(frozen=True)
class Recall:
    """The cache of rank 0 as all ranks see it, for one subject on `ranks`."""

    world: World
    ranks: Sequence[int]
    subject: Subject
    where: dict[str, Any] | None  # the circumstances; None: the cache is off
    cache: Cache | None  # on rank 0 alone

    @classmethod
    def open(
        cls, world: World, ranks: Sequence[int], subject: Subject, whole: Callable[[], Partition]
    ) -> "Recall":
        """All ranks call alike. whole: makes the partition in which nothing is sharded."""
        cache = Cache.open() if world.rank == 0 else None
        on = world.everyone.broadcast_json(cache is not None)
        where = circumstances(world, ranks, subject, whole()) if on else None
        return cls(world, ranks, subject, where, cache)

    def profile(self, partitions: Iterable[Partition], say: Say) -> Profile | None:
        """What is known already, as it holds today; None: nothing is. All ranks call alike.

        partitions: those that are asked for; a program of the first that the profile knows any of
        is sampled. `seconds` of the profile are those that this took.
        """
        began = time.perf_counter()
        kept = self._found()
        if kept is None:
            return None
        partition = _known(partitions, kept.profile)
        for _ in range(LOOKS):
            sampled = again(
                self.world, self.ranks, self.subject, partition, kept.profile,
                devices=True, links=True,
            )  # fmt: skip
            offs: list[float] = self.world.everyone.broadcast_json(off(kept.profile, sampled))
            if max(offs) <= FAR:
                break
        found = self._holding(sampled, *(x <= FAR for x in offs))
        found = replace(found, seconds=time.perf_counter() - began)
        say(_told(kept, found, *offs))
        return found

    def keep(self, profile: Profile, known: Profile | None) -> None:
        """Stores what was measured besides `known`, the profile that was recalled.

        What was merely scaled is not: the next sample is compared with what was measured.
        """
        grown = known is None or _measured(profile) != _measured(known)
        if self.cache is not None and self.where is not None and grown and profile.compute:
            self.cache.store(self.where, profile)

    def _found(self) -> Kept | None:
        """What rank 0 finds, on all ranks. Faults of that day are not those of today."""
        kept = None
        if self.cache is not None and self.where is not None:
            kept = self.cache.find(self.where)
        told = None if kept is None else [kept.profile.to_dict(), kept.written]
        told = self.world.everyone.broadcast_json(told) if self.where is not None else None
        if told is None:
            return None
        return Kept(replace(Profile.from_dict(told[0]), missing=()), told[1])

    def _holding(self, sampled: Profile, compute: bool, network: bool) -> Profile:
        """The parts that hold, beside what belongs to the others, measured anew: the optimizer's
        costs to compute, agreement to the network, overlap to both."""
        if compute and network:
            return sampled
        fresh = facts(self.world, self.ranks, self.subject, ())
        if compute:
            return replace(sampled, network={}, overlap={}, host=fresh.host)
        return replace(fresh, network=sampled.network if network else {})


def _known(partitions: Iterable[Partition], profile: Profile) -> Partition:
    """The first partition of which a program is known, else the first one."""
    first = None
    for partition in partitions:
        first = first or partition
        if any(partition.program(c) in profile.compute for c in partition.components):
            return partition
    assert first is not None, "a profile is recalled for some partition"
    return first


def off(known: Profile, sampled: Profile) -> list[float]:
    """By what factor compute and network differ; what could not be sampled is infinitely far off.

    compute: where it differs most. network: by the median over kinds and patterns, at the smallest
    size or at the largest: single collectives come out twice as long by chance.
    """
    compute = [
        [
            c
            for found in p.compute.values()
            for side in (found.forward, found.backward)
            for c in side
        ]
        for p in (known, sampled)
    ]
    programs = [
        _factor(seconds, after(size))
        for before, after in zip(*compute, strict=True)
        for size, seconds in before.points
    ]
    curves = [(curve, sampled.network[key]) for key, curve in known.network.items()]
    links = [
        median(_factor(before(at), after(at)) for before, after, at in ends)
        for ends in (
            [(before, after, before.points[0][0]) for before, after in curves],
            [(before, after, before.reach) for before, after in curves],
        )
        if ends
    ]
    lost = bool(known.compute) and sampled.compute is known.compute
    cut = bool(known.network) and sampled.network is known.network
    return [
        float("inf") if lost else max(programs, default=1.0),
        float("inf") if cut else max(links, default=1.0),
    ]


def _factor(one: float, other: float) -> float:
    a, b = sorted((one, other))
    return (b + SLACK) / (a + SLACK)


def _measured(profile: Profile) -> tuple[Any, ...]:
    return profile.compute, profile.network, profile.overlap


def _told(kept: Kept, found: Profile, compute: float, network: float) -> str:
    """A sentence on what was reused and what was not."""
    took = f"sampled in {found.seconds:.1f} s"
    lost = [
        f"{what} ({'not sampled' if x == float('inf') else f'off by a factor of {x:.1f}'})"
        for what, x in (("programs", compute), ("links", network))
        if x > FAR
    ]
    if not lost:
        return f"profile of {kept.day} reused, {took}"
    rest = "" if len(lost) == 2 else ", the rest is reused"
    return f"profile of {kept.day}, {took}: {' and '.join(lost)} measured anew{rest}"
