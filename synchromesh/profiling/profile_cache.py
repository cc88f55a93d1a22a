"""The profile cache as all ranks see it: found by rank 0, sampled on all, kept when it has grown.

    profile key -> file (rank 0) -> all ranks -> sampled -> curves scaled, or parts left out

What is sampled is a few programs, every kind of collective and every pattern (`reprofile`): where
they take about what they did, curves are scaled by what they take now. Where they are far off, a
profile of another day is of no use, and compute or network is measured anew."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from statistics import median

from synchromesh.planner.problem import Say
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_folder import (
    ProfileFolder,
    ProfileKey,
    StoredProfile,
    profile_key,
)
from synchromesh.profiling.reprofile import TUNING as SAMPLING
from synchromesh.profiling.reprofile import reprofile
from synchromesh.trace.partition.local import Partition
from synchromesh.values.profile import Curve, Profile

# times as slow or as quick as before, from where curves are not scaled (chosen, not measured)
MOST_OFF = 1.5


@dataclass(frozen=True)
class ProfileCache:
    """The stored profiles of rank 0 as all ranks see them, for one problem on `ranks`."""

    facts: LiveFacts
    ranks: Sequence[int]
    key: ProfileKey | None  # None: the cache is off
    folder: ProfileFolder | None  # on rank 0 alone

    @classmethod
    def open(cls, facts: LiveFacts, ranks: Sequence[int]) -> "ProfileCache":
        """All ranks call alike."""
        folder = ProfileFolder.open() if facts.world.rank == 0 else None
        on = facts.world.everyone.broadcast_json(folder is not None)
        return cls(facts, ranks, profile_key(facts, ranks) if on else None, folder)

    def profile(self, partitions: Iterable[Partition], say: Say) -> Profile | None:
        """What is known already, as it holds today; None: nothing is. All ranks call alike.
        partitions: those that are asked for; a program of the first that the profile knows any of
        is sampled. `seconds` of the profile are those that this took."""
        began = time.perf_counter()
        stored = self._found()
        if stored is None:
            return None
        known = stored.profile
        partition = _known(partitions, known)
        sampled = reprofile(self.facts, self.ranks, partition, known, devices=True, links=True)
        offs: list[float] = self.facts.world.everyone.broadcast_json(off(known, sampled))
        reused = self._reusable(sampled, *(x <= MOST_OFF for x in offs))
        reused = replace(reused, seconds=time.perf_counter() - began)
        say(reuse_text(stored, reused, *offs))
        return reused

    def keep(self, profile: Profile, known: Profile | None) -> None:
        """Stores what was measured besides `known`; what was merely scaled is not."""
        measured = attrgetter("compute", "network", "overlap")
        grown = known is None or measured(profile) != measured(known)
        if self.folder is not None and self.key is not None and grown and profile.compute:
            self.folder.store(self.key, profile)

    def _found(self) -> StoredProfile | None:
        """What rank 0 finds, on all ranks. Faults of that day are not those of today."""
        if self.key is None:
            return None
        stored = None if self.folder is None else self.folder.find(self.key)
        record = None if stored is None else [stored.profile.to_dict(), stored.written]
        record = self.facts.world.everyone.broadcast_json(record)
        if record is None:
            return None
        return StoredProfile(replace(Profile.from_dict(record[0]), missing=()), record[1])

    def _reusable(self, sampled: Profile, compute: bool, network: bool) -> Profile:
        """The parts that hold, beside others measured anew; overlap belongs to both."""
        if compute and network:
            return sampled
        fresh = self.facts.profile((), None, self.ranks)
        if compute:
            return replace(sampled, network={}, overlap={}, host=fresh.host)
        return replace(fresh, network=sampled.network if network else {})


def _known(partitions: Iterable[Partition], profile: Profile) -> Partition:
    first = None
    for partition in partitions:
        first = first or partition
        if any(c.program in profile.compute for c in partition.components):
            return partition
    assert first is not None, "a profile is asked for some partition"
    return first


def off(known: Profile, sampled: Profile) -> list[float]:
    """By what factor compute and network differ (infinite: not sampled): compute where most,
    network by the median, as single collectives come out twice as long by chance."""
    return [_programs_off(known, sampled), _links_off(known, sampled)]


def _programs_off(known: Profile, sampled: Profile) -> float:
    if not known.compute:
        return 1.0
    if sampled.compute is known.compute:
        return inf
    pairs = zip(_program_curves(known), _program_curves(sampled), strict=True)
    return max(_factor(y, after(x)) for before, after in pairs for x, y in before.points)


def _program_curves(profile: Profile) -> list[Curve]:
    return [c for x in profile.compute.values() for side in (x.forward, x.backward) for c in side]


def _links_off(known: Profile, sampled: Profile) -> float:
    if not known.network:
        return 1.0
    if sampled.network is known.network:
        return inf
    curves = [(curve, sampled.network[key]) for key, curve in known.network.items()]
    smallest = median(_factor(b(b.points[0][0]), a(b.points[0][0])) for b, a in curves)
    largest = median(_factor(b(b.reach), a(b.reach)) for b, a in curves)
    return max(smallest, largest)


def _factor(one: float, other: float) -> float:
    a, b = sorted((one, other))
    return (b + SAMPLING.slack) / (a + SAMPLING.slack)


def reuse_text(stored: StoredProfile, reused: Profile, compute: float, network: float) -> str:
    """A sentence on what was reused and what was not."""
    took = f"sampled in {reused.seconds:.1f} s"
    lost = [
        f"{what} ({'not sampled' if x == inf else f'off by a factor of {x:.1f}'})"
        for what, x in (("programs", compute), ("links", network))
        if x > MOST_OFF
    ]
    if not lost:
        return f"profile of {stored.day} reused, {took}"
    rest = "" if len(lost) == 2 else ", the rest is reused"
    return f"profile of {stored.day}, {took}: {' and '.join(lost)} measured anew{rest}"
