"""Plans for other ranks than those that were measured: those that would be left without a host, or
with one more. Nothing is measured for them.

    compute    a rank that stays takes what it took; one that comes, what the median one takes
    network    of a pattern that was measured on the ranks before, the same; of another one, of n
               ranks, by the nearest of its kind, of m, as a ring has rounds and sends (`traffic`):

                   seconds_n(x)  =  (n - 1) / (m - 1) seconds_m(0)
                                    + sent(n) / sent(m) (seconds_m(x) - seconds_m(0))

What needs a program that nobody has run is not priced, and so not chosen."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar, TypeVar, cast

from synchromesh.planner.decision.decide import decide, survey
from synchromesh.planner.problem import (
    Demand,
    Find,
    PartitionCache,
    PlanningProblem,
    Read,
    Write,
    collectives_of,
)
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Curve, Pattern, Profile
from synchromesh.values.traffic import MESSAGES, CollectiveKind, sent_bytes

T = TypeVar("T")
Before = tuple[int, ...]  # of each rank, which it is now, or OtherRanks.NEW: it comes


def plain(plan: Plan) -> Plan:
    """Without what a run, or a price, has filled in."""
    return replace(plan, pieces=None)


@dataclass(frozen=True)
class Prepared:
    """Plans for other ranks, by what these are now; while `current` was in force, for so many
    rows of a global batch."""

    current: Plan | None = None
    rows: int = 0
    plans: Mapping[Before, Plan] = field(default_factory=dict)

    def under(self, plan: Plan, rows: int) -> Mapping[Before, Plan]:
        """Those that still hold."""
        return self.plans if (plain(plan), rows) == (self.current, self.rows) else {}


def remade(known: Profile, before: Before) -> Profile:
    """Of these ranks, by `known` of those before."""
    at = stand_ins(known, before)

    def curves(measured: tuple[Curve, ...]) -> Iterable[Curve]:
        return (measured[min(r, len(measured) - 1)] for r in at)

    device = replace(known.device, slowdowns=tuple(map(known.device.slowdown_of, at)))
    of_these = known.remade(curves, known.relative_slowdown({*at}))
    return replace(of_these, devices=len(at), device=device)


def stand_ins(known: Profile, before: Before) -> list[int]:
    """The rank before that each computes as: one that comes as the median one."""
    slow = known.relative_slowdowns or (1.0,) * known.devices
    middle = sorted(range(len(slow)), key=slow.__getitem__)[len(slow) // 2]
    return [middle if r == OtherRanks.NEW else r for r in before]


def likely(hosts: Sequence[str]) -> list[Before]:
    """What ranks there may be next: those without each host but the first, with which the run
    would end (on one host, without each rank), and with one host more. hosts: of each rank."""
    ranks, named = range(len(hosts)), [*dict.fromkeys(hosts)]
    away = [{r for r in ranks if hosts[r] == gone} for gone in named[1:]] or [{r} for r in ranks]
    come = [OtherRanks.NEW] * (len(hosts) // len(named) if len(named) > 1 else 1)
    return [*(tuple(r for r in ranks if r not in gone) for gone in away), (*ranks, *come)]


@dataclass(frozen=True)
class OtherRanks:
    """A planning problem on ranks that are known by those of now: as `planner.problem.Facts`."""

    NEW: ClassVar = -1  # as of `launcher.generation.Generation`
    extrapolation: ClassVar[float] = inf  # nothing can be timed with more rows

    partitions: PartitionCache
    known: Profile

    @classmethod
    def of(
        cls, problem: PlanningProblem, known: Profile, before: Before, hosts: Sequence[str]
    ) -> "OtherRanks":
        """problem, known: of the ranks of now; hosts: of each of these."""
        limits = tuple(problem.limits[r] for r in stand_ins(known, before))
        copying = problem.copying and tuple("" if r == cls.NEW else hosts[r] for r in before)
        problem = replace(problem, devices=len(before), limits=limits, copying=copying)
        return cls(PartitionCache(problem), remade(known, before))

    def best(self, current: Plan, gain: float) -> Plan | None:
        """The plan of least predicted time that fits; `current` where it is among them, and the
        best one not quicker by that part of its time. None where nothing fits, or has a price."""
        free = current.ranks is None and not current.stages
        choice = decide(self, survey(self, self.known), current if free else None)
        fitting = {c.plan: c.seconds for c in choice.candidates if c.fits and c.time is not None}
        best = next(iter(fitting), None)
        times = {plain(p): t for p, t in sorted(fitting.items(), key=lambda x: -x[1])}
        stays = best and fitting[best] > (1.0 - gain) * times.get(plain(current), inf)
        return current if stays else best

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        return find()

    def profile(
        self, partitions: Iterable[Partition], known: Profile | None,
        ranks: Sequence[int] | None = None, *, rows: int = 0, quick: bool = False,
        besides: Iterable[Demand] = (), micro_batches: Collection[int] = (1,),
    ) -> Profile:  # fmt: skip
        """With the collectives that `partitions` or `besides` ask for, as far as their kind was
        measured at all."""
        known, problem = known or self.known, self.partitions.problem
        count = problem.devices if ranks is None else len(ranks)
        wanted = [d for p in partitions for d in collectives_of(p, problem.rows, count)]
        links = {d[:2]: _nearest(self.known.network, *d[:2]) for d in (*wanted, *besides)}
        found = {key: curve for key, curve in links.items() if curve is not None}
        return replace(known, network={**found, **known.network})


def _nearest(
    network: Mapping[tuple[str, Pattern], Curve], kind: str, ranks: Pattern
) -> Curve | None:
    def apart(other: Pattern) -> tuple[int, int]:
        return abs(other.stride - ranks.stride), abs(other.size - ranks.size)

    measured = min((p for k, p in network if k == kind), key=apart, default=None)
    if measured is None:
        return None
    what, curve = cast(CollectiveKind, kind), network[kind, measured]
    sent, there = (sent_bytes(what, 1 << 40, p.size) for p in (ranks, measured))  # of a terabyte
    rounds = 1.0 if what in MESSAGES else (ranks.size - 1) / (measured.size - 1)
    late = curve(0.0)
    return Curve.of((x, rounds * late + sent / there * (y - late)) for x, y in curve.points)
