"""A look at what has changed since a profile was measured, and a glance at ranks that are idle.

again     the longest program, every collective: known curves change as these do     seconds
glance    whether what keeps ranks idle has become better                            0.1 s
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from synchromesh.engine.groups import World
from synchromesh.measure import network
from synchromesh.measure.facts import (
    Subject,
    Wanted,
    agreement,
    remembered,
    sizes,
    timed_on,
)
from synchromesh.measure.sprint import ease
from synchromesh.profile import Compute, Curve, Pattern, Profile
from synchromesh.trace.local import Partition

LOOK_BYTES = 1 << 14  # the least payload with which links are looked at again ...
LOOK_SECONDS = 0.05  # ... and one call longer than this tells enough
LOOKS = 3  # runs that tell how devices compute now
GLANCE_SECONDS = 0.05  # of the all-reduce that a glance at links takes, at most
QUICKER = 1.5  # times as quick as known: no longer what it was


def again(
    world: World,
    ranks: Sequence[int],
    subject: Subject,
    partition: Partition,
    known: Profile,
    devices: bool,
    links: bool,
) -> Profile:
    """`known` after a change: what drifted is sampled and its curves are scaled accordingly.

    devices: the longest program of `partition` is timed once more on every rank, and each rank's
    curves change by its own ratio. links: each kind of collective on each pattern, at sizes that
    grow until one takes `LOOK_SECONDS`; its curve changes by the ratio at its payload. Takes
    seconds; all ranks call alike.
    """
    began = time.perf_counter()
    profile = known
    if devices:
        profile = _devices_again(world, ranks, subject, partition, profile)
    if links:
        profile = _links_again(world, ranks, profile)
    return replace(profile, seconds=known.seconds + time.perf_counter() - began)


def _devices_again(
    world: World, ranks: Sequence[int], subject: Subject, partition: Partition, known: Profile
) -> Profile:
    found = ease(world, LOOKS)
    profile = replace(known, sprint=found.sprint, pace=found.pace)
    locals_ = {partition.program(c): c for c in partition.components}

    def seconds(key: str) -> float:
        return sum(max(c(c.reach) for c in side) for side in _sides(known.compute[key]))

    timed = [k for k in locals_ if k in known.compute]
    if not timed:  # nothing to compare with: what is new is measured when plans are priced
        return profile
    longest = max(timed, key=seconds)
    local, before = locals_[longest], known.compute[longest]
    wanted = Wanted(
        partition, local, sizes(subject.rows, local.layout), remembered(known, longest)
    )
    measured, _ = timed_on(world, ranks, subject, {longest: wanted}, profile)
    if longest not in measured:
        return known
    ratios = []
    for then, now in zip(
        zip(*_sides(before), strict=True),
        zip(*_sides(measured[longest]), strict=True),
        strict=True,
    ):
        size = now[0].reach
        ratios.append(sum(c(size) for c in now) / max(1e-9, sum(c(size) for c in then)))
    scaled = {
        key: replace(
            found,
            forward=tuple(c.scaled(r) for c, r in zip(found.forward, ratios, strict=True)),
            backward=tuple(c.scaled(r) for c, r in zip(found.backward, ratios, strict=True)),
        )
        for key, found in known.compute.items()
    }
    slowest = max(ratios)  # the optimizer's costs are those of the slowest rank
    return replace(
        profile,
        compute=scaled,
        update_byte=known.update_byte * slowest,
        update_tensor=known.update_tensor * slowest,
        copy_byte=known.copy_byte * slowest,
    )


def _sides(found: Compute) -> tuple[tuple[Curve, ...], tuple[Curve, ...]]:
    return found.forward, found.backward


@dataclass(frozen=True)
class _Change:
    """What links take now over what they took: ratios at the sizes that were sampled, ascending;
    seconds more that the largest takes."""

    ratio: Curve
    more: float

    @classmethod
    def of(cls, before: Curve, now: Sequence[tuple[float, float]]) -> "_Change":
        ratio = Curve(tuple((x, y / max(1e-9, before(x))) for x, y in now))
        largest, seconds = now[-1]
        return cls(ratio, seconds - before(largest))

    @property
    def largest(self) -> float:
        """The ratio at the largest size."""
        return self.ratio.points[-1][1]

    def __call__(self, size: float, seconds: float) -> float:
        """Seconds now, where it took so many. Beyond the sizes: slower links take so much more a
        byte, whatever else had bounded them before; quicker ones take off in proportion."""
        least, most = self.ratio.points[0][0], self.ratio.reach
        if size > most and self.more > 0:
            return seconds + self.more * size / most
        return seconds * self.ratio(min(max(size, least), most))


def _links_again(world: World, ranks: Sequence[int], known: Profile) -> Profile:
    """Each kind on each pattern once more, at growing sizes; its curve and, by the largest size on
    the most ranks, the kind's overlap change alike. One that needs more ranks than there are
    changes as another one of its kind does."""
    changes: dict[tuple[str, Pattern], _Change] = {}
    for kind, pattern in sorted(known.network):
        if pattern.size * pattern.stride <= len(ranks):
            before = known.network[kind, pattern]
            sizes = [int(size) for size, _ in before.points if size >= LOOK_BYTES]
            now = network.sampled(world, ranks, kind, pattern, sizes, LOOK_SECONDS)
            changes[kind, pattern] = _Change.of(before, now)
    if not changes:
        return known
    of_kind = {key[0]: change for key, change in changes.items()}  # of the most ranks
    other = of_kind.get("all_reduce", next(iter(of_kind.values())))
    links = {}
    for key, curve in known.network.items():
        change = changes.get(key, of_kind.get(key[0], other))
        links[key] = Curve.of((x, change(x, y)) for x, y in curve.points)
    rates = {
        kind: o.stretched(of_kind.get(kind, other).largest) for kind, o in known.overlap.items()
    }
    return replace(known, network=links, overlap=rates, host=agreement(world))


@dataclass(frozen=True)
class Glance:
    """What has become better, and how much it is quicker; 1: nothing."""

    devices: float = 1.0
    links: float = 1.0

    def __bool__(self) -> bool:
        return max(self.devices, self.links) > QUICKER

    def __str__(self) -> str:
        what, times = ("idle ranks compute", self.devices), ("links carry", self.links)
        name, factor = max(what, times, key=lambda x: x[1])
        return f"{name} {factor:.1f} times as fast as when they were measured"


def glance(world: World, active: Sequence[int], known: Profile) -> Glance:
    """Whether what keeps the ranks beside `active` idle has become better: their pace where they
    are slower than those, else the links. Steps of the others tell nothing of either.
    """
    pace = [known.pace_of(r) for r in range(world.size)]
    slow = [r for r in range(world.size) if pace[r] > QUICKER * min(pace[a] for a in active)]
    if slow:
        now = ease(world, 1).pace
        return Glance(devices=max(pace[r] / now[r] for r in slow))
    everyone = ("all_reduce", Pattern(world.size))
    if everyone not in known.network:
        return Glance()
    curve = known.network[everyone]
    payload, usual = max(
        (p for p in curve.points if p[1] <= GLANCE_SECONDS), default=curve.points[0]
    )
    seconds = [
        network.slowest(world, world.everyone, "all_reduce", world.size, int(payload))
        for _ in range(2)  # one may have found an old message under way; both are quick or none
    ]
    return Glance(links=usual / max(1e-9, *seconds))
