"""Shares: what the time of training steps went into, on each rank.

Of one rank, as sets of seconds within its steps W (|X| is the length of X):

    C   its computations
    M   its communications, each from when this rank began it to its end
    T   of these the transfers: each from when its last rank began it (of a receive: its sender)

    computation = |C| / |W|
    exposed     = |M - C| / |W|           communication while the rank computes nothing
    waiting     = |M - C - T| / |W|       of it: no transfer goes on, another rank is late
    hidden      = |T & C| / |W|           transfers while the rank computes
    other       = |W - C - M| / |W|       neither

so that computation + exposed + other = 1, hidden <= computation and waiting <= exposed. Which
communications are the same on different ranks: the k-th of a name among the same ranks."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from synchromesh.runs.spans import (
    Intervals,
    Recording,
    Span,
    common,
    covered_before,
    length,
    minus,
    union,
)

SENT_AS = {"receive": "send"}  # what the other rank calls it


@dataclass(frozen=True)
class Shares:
    """Shares of the time of the recorded steps, as in the module's equations.

    seconds     of all recorded steps together
    exposed_by  `exposed` by the communication's name; several at once share the time evenly"""

    computation: float
    exposed: float
    hidden: float
    waiting: float
    other: float
    seconds: float
    exposed_by: Mapping[str, float] = field(default_factory=dict)


def shares(recordings: Sequence[Recording]) -> list[Shares]:
    """Of each rank, on a common clock, in order. ValueError where one recorded no step."""
    for recording in recordings:
        if length(union(recording.steps)) <= 0:
            raise ValueError(
                f"rank {recording.rank} recorded no step ({len(recording.spans)} spans): run the "
                "steps in `with recorder.step():`"
            )
    begun = _last_begun(recordings)
    return [_of_rank(recording, begun) for recording in recordings]


def mean(of_ranks: Sequence[Shares]) -> Shares:
    """The mean over the ranks, each counted alike."""
    names = sorted({name for one in of_ranks for name in one.exposed_by})
    exposed_by = {name: fmean(s.exposed_by.get(name, 0.0) for s in of_ranks) for name in names}
    fields = ("computation", "exposed", "hidden", "waiting", "other", "seconds")
    means = {name: fmean(getattr(s, name) for s in of_ranks) for name in fields}
    return Shares(**means, exposed_by=exposed_by)


def waits(recordings: Sequence[Recording]) -> list[Intervals]:
    """When each rank waits for another, M - C - T, in order, of recordings on a common clock."""
    begun = _last_begun(recordings)
    return [_Times.of(recording, begun).waiting for recording in recordings]


@dataclass(frozen=True)
class _Times:
    """W, C, M and T of one rank."""

    wall: Intervals
    computing: Intervals
    under_way: Intervals
    transfers: Intervals

    @classmethod
    def of(cls, recording: Recording, begun: Mapping[Span, float]) -> "_Times":
        wall = union(recording.steps)
        computing = union((s.start, s.end) for s in recording.spans if s.kind == "computation")
        traffic = [s for s in recording.spans if s.kind == "communication"]
        under_way = union((s.start, s.end) for s in traffic)
        transfers = union((max(s.start, begun[s]), s.end) for s in traffic)
        return cls(wall, *(common(seconds, wall) for seconds in (computing, under_way, transfers)))

    @property
    def exposed(self) -> Intervals:
        return minus(self.under_way, self.computing)

    @property
    def waiting(self) -> Intervals:
        return minus(self.exposed, self.transfers)


def _of_rank(recording: Recording, begun: Mapping[Span, float]) -> Shares:
    times = _Times.of(recording, begun)
    total = length(times.wall)
    by_name = _by_name(times.exposed, [s for s in recording.spans if s.kind == "communication"])
    return Shares(
        computation=length(times.computing) / total,
        exposed=length(times.exposed) / total,
        hidden=length(common(times.transfers, times.computing)) / total,
        waiting=length(times.waiting) / total,
        other=length(minus(minus(times.wall, times.computing), times.under_way)) / total,
        seconds=total,
        exposed_by={name: seconds / total for name, seconds in sorted(by_name.items())},
    )


def _last_begun(recordings: Sequence[Recording]) -> dict[Span, float]:
    """When the last rank began each communication. One that cannot be matched, since its ranks
    recorded different numbers of them, begins when its own rank does."""
    occurrences: dict[tuple[str, tuple[int, ...]], dict[int, list[Span]]] = defaultdict(dict)
    for recording in recordings:
        for span in sorted(recording.spans, key=lambda s: s.start):
            if span.kind == "communication":
                occurrences[span.name, span.ranks].setdefault(recording.rank, []).append(span)
    begun: dict[Span, float] = {}
    for (name, ranks), by_rank in occurrences.items():
        senders = occurrences.get((SENT_AS.get(name, ""), ranks), {})
        partners = [*by_rank.values(), *senders.values()]
        alike = len({len(spans) for spans in partners}) == 1
        for spans in by_rank.values():
            for k, span in enumerate(spans):
                begun[span] = max(p[k].start for p in partners) if alike else span.start
    return begun


def _by_name(exposed: Intervals, traffic: Sequence[Span]) -> dict[str, float]:
    """Seconds of `exposed` by name; an instant with n communications counts 1/n for each."""
    lasting = [s for s in traffic if s.end > s.start]
    edges = [(s.start, 1, s.name) for s in lasting] + [(s.end, -1, s.name) for s in lasting]
    by_name: dict[str, float] = defaultdict(float)
    going_on, before, covered = Counter[str](), 0.0, covered_before(exposed)
    for at, change, name in sorted(edges):
        count = going_on.total()
        seconds = covered(at) - covered(before) if count else 0.0
        for other, times in going_on.items() if seconds else ():
            by_name[other] += seconds * times / count
        going_on[name] += change
        before = at
    return by_name
