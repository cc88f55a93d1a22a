"""A way for every component inside the stages of a plan.

The cuts, groups and micro-batches m of the plan stand. Inside a stage a value that is made and
read there moves between ways as its link says; over a cut it is a message, of the first
component's way on arrival and of the last one's on departure. A mix of ways takes, as in
`stages.problem`,

    t         = max(begin + sum of forward, backward and links + (1 - a) w, w / b)
    e         = what gradient traffic takes after the last backward + sum of update
    x         = 2 message of the first cut

    passage   = slowdown t + x                       T = sum of passages + most of slowest
    slowest   = (m - 1) slowdown t + e

A stage that waits for a slower one wants the least passage, the slowest one the least of both. The
search of the chain (`chain`) finds the mix of least

    passage + share slowest  =  W t + x + share e        W = slowdown (1 + share (m - 1))

as a step whose backward, gradient traffic and update are `share` times what they are, as gradient
traffic begins with the last micro-batch, and whose forward is the rest of W t:

    forward'  = W forward + (W - share) backward         backward' = share backward

with shares 0 and 1, and some between where these differ. Of the mixes found and the plan's own
ways those of least T are taken. No mixes take less than

    max over stages s of  least (passage + slowest) of s + sum over others of least passage

What T is above that is the gap."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from synchromesh.planner.chain.problem import (
    EXACT,
    Floats,
    Option,
    PricedEdge,
    Prices,
    Problem,
    evaluate,
    gap,
)
from synchromesh.planner.chain.search import search
from synchromesh.planner.stages.problem import PlannedStage, StageFacts, StagePlan, StageProblem
from synchromesh.values.schedule import most_in_flight


@dataclass(frozen=True, eq=False)
class Inside:
    """What may be mixed in a stage: ways, what components take in each without links, and the
    links, from the stage's first component on and with places in `ways` as borders."""

    ways: tuple[int, ...]
    facts: tuple[StageFacts, ...]
    links: tuple[PricedEdge, ...]


Find = Callable[[PlannedStage, int], Inside | None]  # of so many micro-batches; None: one way


def mixed(problem: StageProblem, plan: StagePlan, find: Find) -> StagePlan | None:
    """The plan with ways of least step time; None: its own are. Its gap is over these cuts."""
    m, costs = plan.micro_batches, problem.costs(plan.micro_batches)
    every, start = [], 0
    for s, stage in enumerate(plan.stages):
        held = most_in_flight(len(plan.stages), (s,), m)
        place = StagePlace(*problem.kind(start, stage.devices), m, held)
        at = (stage.way, stage.first, stage.end, problem.sizes.index(stage.devices))
        own = place.mix(stage, *(float(x[at]) for x in (costs.seconds, costs.fill, costs.end)))
        every.append(_mixes(place, own, find(stage, m)))
        start += stage.devices
    best = _least(every)
    seconds = _seconds(best)
    if seconds >= plan.seconds * (1 - EXACT):
        return None
    passages = sum(x.passage for x in every)
    lower = max(passages - x.passage + x.both for x in every)
    stages = tuple(mix.stage for mix in best)
    return replace(plan, stages=stages, seconds=seconds, gap=gap(seconds, lower))


@dataclass(frozen=True)
class StagePlace:
    """Where a stage stands: its group's slowdown and bytes, micro-batches in a step, in flight."""

    slowdown: float
    limit: float
    micro_batches: int
    held: int

    def mix(self, stage: PlannedStage, seconds: float, fill: float, end: float) -> "Mix":
        busy = self.slowdown * seconds
        return Mix(stage, busy + fill, (self.micro_batches - 1) * busy + end)


@dataclass(frozen=True)
class Mix:
    stage: PlannedStage
    passage: float
    slowest: float

    def seconds(self, share: float) -> float:
        return self.passage + share * self.slowest


@dataclass(frozen=True)
class Mixes:
    """The mixes of a stage that may be best, and below what there is none."""

    offered: tuple[Mix, ...]
    passage: float
    both: float  # passage + slowest


def _mixes(place: StagePlace, own: Mix, inside: Inside | None, halvings: int = 2) -> Mixes:
    """The mixes that memory holds; the stage's own alone where it holds no other. halvings: of the
    shares between 0 and 1, so that a stage is searched at most 5 times; chosen, not measured."""
    if inside is not None:
        searches = Searches(place, own.stage, inside)
        least, most = searches.least(0.0), searches.least(1.0)
        if least and most:
            (passing, passage), (whole, both) = least, most
            between = searches.between(passing, whole, halvings)
            return Mixes((own, passing, whole, *between), passage, both)
    return Mixes((own,), own.seconds(0.0), own.seconds(1.0))


@dataclass(frozen=True)
class Searches:
    place: StagePlace
    stage: PlannedStage
    inside: Inside

    def least(self, share: float) -> tuple[Mix, float] | None:
        """The mix of least passage + share slowest, and what none is below; None: no memory."""
        place = self.place
        times = place.slowdown * (1 + share * (place.micro_batches - 1))
        plan = search(self.chain(times, share), place.limit)
        if not plan.within:
            return None
        return self.mix(plan.choice), plan.seconds * (1 - plan.gap)

    def between(self, a: Mix, b: Mix, halvings: int) -> Iterator[Mix]:
        """Those that shares are best with between the ones of a and b."""
        if not halvings or a.passage >= b.passage or a.slowest <= b.slowest:
            return
        share = min(1.0, (b.passage - a.passage) / (a.slowest - b.slowest))
        best = self.least(share)
        if best and best[0].seconds(share) < a.seconds(share) * (1 - EXACT):
            yield best[0]
            yield from self.between(a, best[0], halvings - 1)
            yield from self.between(best[0], b, halvings - 1)

    def mix(self, choice: Sequence[int]) -> Mix:
        first, last = self.inside.facts[choice[0]], self.inside.facts[choice[-1]]
        arrives = float(first.message[self.stage.first])
        leaves = float(last.message[self.stage.end])
        passing, whole = (evaluate(self.chain(1.0, share), choice)[0] for share in (0.0, 1.0))
        seconds = max(passing - 2 * arrives, (arrives + leaves) / first.overlap.network)
        ways = tuple(self.inside.ways[k] for k in choice)
        stage = replace(self.stage, way=ways[0], ways=ways if len(set(ways)) > 1 else ())
        return self.place.mix(stage, seconds, 2 * arrives, whole - passing)

    def chain(self, times: float, share: float) -> Problem:
        """The problem of a chain whose step takes times t + x + share e."""
        rest = times - share
        known: dict[tuple[Option, ...], tuple[Option, ...]] = {}
        components = []
        for i in range(self.stage.first, self.stage.end):
            options = tuple(
                self._option(facts, i, border, times, share)
                for border, facts in enumerate(self.inside.facts)
            )
            components.append(known.setdefault(options, options))
        prices: dict[int, Prices] = {}
        for link in self.inside.links:
            p = link.prices
            if id(p) not in prices:
                forward = _times(times, p.forward) + _times(rest, p.backward)
                prices[id(p)] = replace(p, forward=forward, backward=_times(share, p.backward))
        links = (replace(link, prices=prices[id(link.prices)]) for link in self.inside.links)
        return Problem(tuple(components), tuple(links))

    def _option(
        self, facts: StageFacts, i: int, border: int, times: float, share: float
    ) -> Option:
        at_first, at_last = i == self.stage.first, i == self.stage.end - 1
        arrives = float(facts.message[i]) if at_first else 0.0
        leaves = float(facts.message[i + 1]) if at_last else 0.0
        forward, backward = float(facts.forward[i]), float(facts.backward[i])
        forward += (1 - facts.overlap.compute) * (arrives + leaves) + facts.begin * at_first
        return Option(
            times * forward + (times - share) * backward, share * backward,
            share * float(facts.gradient[i]), share * float(facts.update[i]) + 2 * arrives,
            ceil(facts.resident[i] + self.place.held * facts.kept[i]), border,
        )  # fmt: skip


def _times(factor: float, seconds: Floats) -> Floats:
    """The seconds so often; what is not allowed stays so."""
    return np.multiply(factor, seconds, where=np.isfinite(seconds), out=seconds.copy())


def _least(every: Sequence[Mixes]) -> tuple[Mix, ...]:
    caps = sorted({mix.slowest for x in every for mix in x.offered})
    below = ([[mix for mix in x.offered if mix.slowest <= cap] for x in every] for cap in caps)
    return min(
        (
            tuple(min(some, key=lambda mix: mix.passage) for some in allowed)
            for allowed in below
            if all(allowed)
        ),
        key=_seconds,
    )


def _seconds(mixes: Sequence[Mix]) -> float:
    """T."""
    return sum(mix.passage for mix in mixes) + max(mix.slowest for mix in mixes)
