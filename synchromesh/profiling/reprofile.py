"""Reprofiling: what has changed since a profile was measured is sampled; idle ranks are probed.

reprofile   the longest programs, every kind of collective and every pattern of groups: known
            curves change as these do; seconds
probe_idle  whether what keeps ranks idle has become better; a tenth of a second, or a few"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, median_low
from typing import cast

from synchromesh.engine.world import World
from synchromesh.planner.problem import program_rows
from synchromesh.profiling import collectives as network
from synchromesh.profiling.burst_speed import measure_device_model
from synchromesh.profiling.live_facts import LiveFacts, agreement_seconds
from synchromesh.profiling.programs import Wanted, known_memory
from synchromesh.programs.clock import clock
from synchromesh.trace.partition.local import Partition
from synchromesh.values.profile import Compute, Curve, DeviceModel, Pattern, Profile
from synchromesh.values.traffic import MESSAGES, CollectiveKind, sent_bytes


@dataclass(frozen=True)
class ReprofileTuning:
    """How devices and links are sampled; chosen, not measured, where nothing else is said."""

    link_bytes: int = 1 << 14  # the least payload with which links are sampled ...
    link_seconds: float = 0.05  # ... and one call longer than this tells enough
    device_runs: int = 2  # runs that tell how devices compute now
    programs: int = 3  # that are timed again, the longest ones
    program_seconds: float = 0.05  # of one of them at most, if any of its rows take less
    block_seconds: float = 0.05  # of each block of its runs
    outlier: float = 1.3  # times as fast or slow as others: as `unequal` of `planner.unequal`
    # Times what was known, from where a sample is doubted. Of 600 small calls between four hosts
    # with 200 Mbit/s and 40 % of a core, beside other work, a quarter took more than 3 times as
    # long as most did, half of these 10 times: a turn of the processor lasts milliseconds.
    doubtful: float = 4 / 3
    again: int = 2  # more samples of what is doubted, at most
    slack: float = 1e-4  # seconds that calls differ by on any day
    late: float = 3.0  # times what a small collective took: latency has changed
    changed: float = 1.2  # times what a large one took: links have


TUNING = ReprofileTuning()
QUICKER = 1.5  # times as quick as known: idle ranks are worth a reprofile (chosen, not measured)
Point = tuple[float, float]  # a size or a rank, and seconds or a slowdown
Points = Sequence[Point]


def confirmed(sample: Callable[[], Points], known: Callable[[float], float]) -> Points:
    """The points that `sample` finds, alike on all ranks. While one is a third above what was
    `known` there is another sample, and the least counts: what else runs makes nothing quicker."""

    def times(point: Point) -> float:
        return (point[1] + TUNING.slack) / (known(point[0]) + TUNING.slack)

    least = sample()
    for _ in range(TUNING.again):
        if max(map(times, least)) <= TUNING.doubtful:
            break
        least = [min(points, key=times) for points in zip(least, sample(), strict=True)]
    return least


def reprofile(
    facts: LiveFacts, ranks: Sequence[int], partition: Partition, known: Profile, devices: bool,
    links: bool,
) -> Profile:  # fmt: skip
    """`known` after a change: what drifted is sampled and its curves are scaled accordingly.
    devices: the longest programs of `partition` are timed again, and each rank's curves change by
    its own ratio. links: see `_links_again`. All ranks call alike, for seconds."""
    began = time.perf_counter()
    profile = known
    if devices:
        profile = _devices_again(facts, ranks, partition, profile)
    if links:
        profile = _links_again(facts.world, ranks, profile)
    return replace(profile, seconds=known.seconds + time.perf_counter() - began)


def _devices_again(
    facts: LiveFacts, ranks: Sequence[int], partition: Partition, known: Profile
) -> Profile:
    world, models = facts.world, [known.device]

    def slowdowns() -> list[Point]:
        models.append(measure_device_model(world, TUNING.device_runs))
        return list(enumerate(models[-1].slowdowns))

    usual = confirmed(slowdowns, lambda r: known.device.slowdown_of(int(r)))
    now = DeviceModel(models[-1].burst, tuple(s for _, s in usual))
    profile = replace(known, device=now)
    later = [now.slowdown_of(r) / known.device.slowdown_of(r) for r in range(world.size)]
    locals_ = {c.program: c for c in partition.components}
    timed = sorted((k for k in locals_ if k in known.compute), key=lambda k: -_seconds(known, k))
    if not timed:  # nothing to compare with: what is new is measured when plans are priced
        return profile
    wanted = {}
    for key in timed[: TUNING.programs]:
        possible = program_rows(facts.problem.rows, locals_[key].layout)
        rows = _sampled_rows(known.compute[key], possible, later)
        wanted[key] = Wanted(partition, locals_[key], (rows,), known_memory(known, key))

    def ratios(new: Compute, old: Compute) -> list[float]:
        rows = new.reach
        return [sum(new.on(r, rows)) / max(1e-9, sum(old.on(r, rows))) for r in range(world.size)]

    def programs() -> list[Point]:
        measured, _ = facts.timed(ranks, wanted, profile, TUNING.block_seconds)
        if not measured:  # they do not fit beside what training holds now: slowdowns alone tell
            return list(enumerate(later))
        # the median: while one ran, something else may have
        each = zip(*(ratios(new, known.compute[k]) for k, new in measured.items()), strict=True)
        return list(enumerate(map(median, each)))

    taken = [t for _, t in confirmed(programs, lambda r: later[int(r)])]
    if all(world.everyone.all_gather_json(clock(world.device) is not None)):
        taken = _settled(taken, later)
    return _scaled(profile, taken)


def _settled(taken: Sequence[float], later: Sequence[float]) -> list[float]:
    """What programs take on each rank over what they took, `later` being how slowdowns, and so a
    rank's share of a processor, changed. The rest is of all ranks alike but for one that stands
    out."""
    beside = [t / p for t, p in zip(taken, later, strict=True)]
    usual = median_low(beside)
    return [
        p * (b if max(b / usual, usual / b) > TUNING.outlier else usual)
        for b, p in zip(beside, later, strict=True)
    ]


def _seconds(known: Profile, key: str) -> float:
    program = known.compute[key]
    return max(sum(program.on(r, program.reach)) for r in range(len(program.forward)))


def _sampled_rows(program: Compute, rows: Sequence[int], later: Sequence[float]) -> int:
    """The most of `rows`, else the fewest, that take no longer than sampling may now."""

    def seconds(n: int) -> float:
        return max(sum(program.on(r, n)) * times for r, times in enumerate(later))

    return max((n for n in rows if seconds(n) <= TUNING.program_seconds), default=rows[0])


def _scaled(known: Profile, ratios: Sequence[float]) -> Profile:
    before = known.relative_slowdowns or (1.0,) * len(ratios)
    after = [t * r for t, r in zip(before, ratios, strict=True)]
    slowest = max(after) / max(before)  # the optimizer's costs are those of the slowest rank

    def ranks(curves: tuple[Curve, ...]) -> Iterable[Curve]:
        return (c.scaled(r) for c, r in zip(curves, ratios, strict=True))

    return known.remade(ranks, slowest)


@dataclass(frozen=True)
class _Sample:
    """One kind on one pattern, sampled: seconds that every collective takes longer (0 where a
    small one takes about what it did), seconds more a sent byte, the ratio of the largest."""

    late: float
    more: float
    ratio: float
    changed: bool = False  # whether `more` is a real share of what the largest one took

    @classmethod
    def of(cls, kind: str, ranks: int, before: Curve, now: Sequence[Point]) -> "_Sample":
        (small, first), (large, last) = now[0], now[-1]
        sent = [max(1, _sent(kind, x, ranks)) for x in (small, large)]
        longer = [first - before(small), last - before(large)]
        if large == small:  # all that is ever sent is small
            return cls(longer[0], 0.0, first / max(1e-9, before(small)))
        late, more = 0.0, longer[1] / sent[1]
        slope = (longer[1] - longer[0]) / (sent[1] - sent[0])
        offset = longer[0] - slope * sent[0]
        if not 1 / TUNING.late < 1 + offset / max(1e-9, before(small)) < TUNING.late:
            late, more = offset, slope
        usual = max(1e-9, before(large))
        return cls(late, more, last / usual, abs(more * sent[1]) > (TUNING.changed - 1) * usual)


def _sent(kind: str, payload: float, ranks: int) -> int:
    return sent_bytes(cast(CollectiveKind, kind), int(payload), ranks)


def _on(kind: str, pattern: Pattern, devices: int) -> bool:
    reach = pattern.stride + 1 if kind in MESSAGES else pattern.size * pattern.stride
    return reach <= devices


def _links_again(world: World, ranks: Sequence[int], known: Profile) -> Profile:
    """`known` with links as they are now; overlap stretches as the largest collective does."""
    if not any(_on(*key, len(ranks)) for key in known.network):
        return known
    samples = _LinkSamples.take(world, ranks, known)
    network = {key: samples.curve(*key, before) for key, before in known.network.items()}
    rates = {
        kind: o.stretched(samples.of(kind, samples.widest_of(kind)).ratio)
        for kind, o in known.overlap.items()
    }
    ((_, host),) = confirmed(lambda: [(0.0, agreement_seconds(world))], lambda _: known.host)
    return replace(known, network=network, overlap=rates, host=host)


@dataclass(frozen=True)
class _LinkSamples:
    """Every pattern sampled by one kind of collective, and every kind on the most ranks. With D
    seconds more a sent byte, of that kind r and of these ranks w, another kind k on another
    pattern p takes

        D(k, p)  =  D(k, w) D(r, p) / D(r, w)        C'(k, p, x)  =  C(k, p, x) + D(k, p) sent(x)

    and no less than in proportion: what bounds it where links are quick has not become quicker."""

    taken: Mapping[tuple[str, Pattern], _Sample]
    widest: Mapping[str, Pattern]  # on which a kind was sampled
    kinds: Mapping[Pattern, str]  # by which a pattern was

    @classmethod
    def take(cls, world: World, ranks: Sequence[int], known: Profile) -> "_LinkSamples":
        here = [key for key in sorted(known.network) if _on(*key, len(ranks))]
        widest = {kind: max(p for k, p in here if k == kind) for kind, _ in here}
        kinds = {
            pattern: min((k for k, p in here if p == pattern), key=lambda k: k != "all_reduce")
            for _, pattern in here
        }
        taken = {}
        for kind, pattern in sorted({*widest.items(), *((k, p) for p, k in kinds.items())}):
            before = known.network[kind, pattern]
            sizes = [int(size) for size, _ in before.points if size >= TUNING.link_bytes]
            asked = kind, pattern, sizes, TUNING.link_seconds
            now = confirmed(partial(network.sampled, world, ranks, *asked), before)
            taken[kind, pattern] = _Sample.of(kind, pattern.size, before, now)
        return cls(taken, widest, kinds)

    def widest_of(self, kind: str) -> Pattern:
        return self.widest.get(kind, max(self.kinds))

    def of(self, kind: str, pattern: Pattern) -> _Sample:
        if (kind, pattern) in self.taken:
            return self.taken[kind, pattern]
        wide = self.widest_of(kind)
        by_kind = self.taken.get((kind, wide), self.taken[self.kinds[wide], wide])
        sampled = pattern in self.kinds
        by_pattern = self.taken[self.kinds[pattern], pattern] if sampled else by_kind
        base = self.taken.get((self.kinds.get(pattern, kind), wide))
        if base is None or not base.changed or by_pattern.more * base.more <= 0.0:
            return by_pattern
        ratio = by_kind.ratio * by_pattern.ratio / base.ratio
        return _Sample(by_pattern.late, by_kind.more * by_pattern.more / base.more, ratio)

    def curve(self, kind: str, pattern: Pattern, before: Curve) -> Curve:
        now = self.of(kind, pattern)
        return Curve.of(
            (x, max(y + now.late + now.more * _sent(kind, x, pattern.size),
                    y * min(1.0, now.ratio)))
            for x, y in before.points
        )  # fmt: skip


@dataclass(frozen=True)
class IdleProbe:
    """What has become better, and how much it is quicker; 1: nothing."""

    devices: float = 1.0
    links: float = 1.0
    call: tuple[int, float] | None = None  # payload and seconds of the all-reduce

    def __bool__(self) -> bool:
        return max(self.devices, self.links) > QUICKER

    def __str__(self) -> str:
        what, times = ("idle ranks compute", self.devices), ("links carry", self.links)
        name, factor = max(what, times, key=lambda x: x[1])
        return f"{name} {factor:.1f} times as fast as when they were measured"


def probe_idle(
    world: World, active: Sequence[int], known: Profile, usual: Mapping[int, float],
    most: float = 0.05,
) -> IdleProbe:  # fmt: skip
    """Whether what keeps the ranks beside `active` idle has become better: their slowdown, where
    it is larger than that of those, or the links. usual: seconds of all-reduces by payload, where
    they are not what `known` says. most: of the all-reduce that probes links (chosen)."""
    devices = _idle_devices(world, active, known.device)
    everyone = known.network.get(("all_reduce", Pattern(world.size)))
    if devices > QUICKER or everyone is None:
        return IdleProbe(devices)
    points = everyone.points
    size, seconds = max((p for p in points if p[1] <= most), default=points[0])
    payload = int(size)
    calls = [
        network.slowest(world, world.everyone, "all_reduce", world.size, payload)
        for _ in range(2)  # one alone is chance: both are quick, or none
    ]
    links = usual.get(payload, seconds) / max(1e-9, *calls)
    return IdleProbe(devices, links, (payload, max(calls)))


def _idle_devices(world: World, active: Sequence[int], known: DeviceModel) -> float:
    limit = QUICKER * min(map(known.slowdown_of, active))
    idle = [r for r in range(world.size) if r not in active and known.slowdown_of(r) > limit]
    if not idle:
        return 1.0
    now = measure_device_model(world, 1)
    return max(known.slowdown_of(r) / now.slowdown_of(r) for r in idle)
