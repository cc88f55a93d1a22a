"""Ways that differ inside a stage: against every mix, with messages, links and binding memory."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from synchromesh.planner.chain.problem import PricedEdge, Prices
from synchromesh.planner.stages.mixes import Inside, mixed
from synchromesh.planner.stages.problem import (
    PlannedStage,
    StageCosts,
    StageFacts,
    StagePlan,
    StageProblem,
    stage_costs,
)
from synchromesh.planner.stages.search import search
from synchromesh.values.profile import Overlap

DEGREES = (1, 2, 4)
SIZES = (1, 2, 4)
LINKS = ((0, (1,)), (1, (2, 3)), (2, (3,)), (3, (4,)), (0, (4,)))
COUNT = 5
OVERLAP = Overlap(0.8, 0.5)
BEGIN = 0.01


@dataclass(frozen=True)
class Model:
    """Five components with facts by size of the group and degree, and links between them."""

    seed: int

    @cache  # noqa: B019
    def alone(self, size: int, degree: int, m: int) -> StageFacts:
        chance = np.random.default_rng((self.seed, size, degree))
        parts = [chance.uniform(0.0, 1.0, COUNT) for _ in range(6)]
        forward, backward, gradient, update, resident, kept = parts
        message = np.r_[0.0, chance.uniform(0.0, 0.3, COUNT - 1), 0.0]
        return StageFacts(
            forward / m, backward / m, 2 * gradient * (size > degree), update,
            1e6 * resident, 1e6 * kept / m, message / m, BEGIN, OVERLAP,
        )  # fmt: skip

    @cache  # noqa: B019
    def prices(self, link: int, size: int, m: int) -> Prices:
        """Between all degrees that the group may have; some forbidden."""
        chance = np.random.default_rng((self.seed, link, size))
        count = len(offered(size))
        tables = [chance.uniform(0.0, 0.2, (count, count)) / m for _ in range(2)]
        forbidden = chance.uniform(size=(count, count)) < 0.1 * (1 - np.eye(count))
        tables = [np.where(forbidden, np.inf, table) for table in tables]
        return Prices(*tables, tuple(range(count)))

    def moved(self, size: int, degree: int, m: int, links: range | list[int]) -> StageFacts:
        """With what these links take between components of one degree."""
        alone, way = self.alone(size, degree, m), DEGREES.index(degree)
        forward, backward = alone.forward.copy(), alone.backward.copy()
        for k in links:
            forward[LINKS[k][0]] += self.prices(k, size, m).forward[way, way]
            backward[LINKS[k][0]] += self.prices(k, size, m).backward[way, way]
        return replace(alone, forward=forward, backward=backward)

    def inside(self, stage: PlannedStage, m: int) -> Inside | None:
        size, first, end = stage.devices, stage.first, stage.end
        if len(offered(size)) < 2:
            return None
        made = [k for k, (source, _) in enumerate(LINKS) if first <= source < end]
        within = [k for k in made if LINKS[k][1][0] < end]
        behind = [k for k in made if k not in within]
        edges = [
            PricedEdge(
                LINKS[k][0] - first,
                tuple(r - first for r in LINKS[k][1] if r < end),
                self.prices(k, size, m),
            )
            for k in within
        ]
        facts = [self.moved(size, DEGREES[w], m, behind) for w in offered(size)]
        return Inside(tuple(offered(size)), tuple(facts), tuple(edges))

    def problem(self, slowdowns: tuple[float, ...], limit: float) -> StageProblem:
        @cache
        def costs(m: int) -> StageCosts:
            links = range(len(LINKS))
            return stage_costs(
                lambda g, d, m: self.moved(g, d, m, links), m, SIZES, DEGREES, COUNT
            )

        return StageProblem(COUNT, SIZES, (limit,) * len(slowdowns), slowdowns, (1, 2, 4), costs)

    # What a mix takes, by the equations

    def seconds(self, problem: StageProblem, plan: list[PlannedStage], m: int) -> float:
        total, slowest, start = 0.0, 0.0, 0
        for s, stage in enumerate(plan):
            slowdown, limit = problem.kind(start, stage.devices)
            t, x, e, held = self.takes(stage, m, min(len(plan) - s, m))
            if held > limit or math.isinf(t):
                return math.inf
            total += slowdown * t + x
            slowest = max(slowest, (m - 1) * slowdown * t + e)
            start += stage.devices
        return total + slowest

    @cache  # noqa: B019
    def takes(self, stage: PlannedStage, m: int, held: int) -> tuple[float, float, float, float]:
        """t, x, e, bytes."""
        way = dict(zip(range(stage.first, stage.end), stage.way_of, strict=True))
        of = {i: self.alone(stage.devices, DEGREES[w], m) for i, w in way.items()}
        forward = {i: of[i].forward[i] for i in way}
        backward = {i: of[i].backward[i] for i in way}
        for k, (source, readers) in enumerate(LINKS):
            if source in way:
                prices = self.prices(k, stage.devices, m)
                for w in {way[r] for r in readers if r in way} or {way[source]}:
                    forward[source] += prices.forward[way[source], w]
                    backward[source] += prices.backward[way[source], w]
        first, last = stage.first, stage.end - 1
        arrives, leaves = of[first].message[first], of[last].message[last + 1]
        c, w = BEGIN + sum(forward.values()) + sum(backward.values()), arrives + leaves
        t = max(c + (1 - OVERLAP.compute) * w, w / OVERLAP.network)
        left = [
            sum(of[i].gradient[i] for i in way if i <= q) - sum(backward[i] for i in way if i < q)
            for q in way
        ]
        e = max(0.0, *left) + sum(of[i].update[i] for i in way)
        return t, 2 * arrives, e, sum(of[i].resident[i] + held * of[i].kept[i] for i in way)


def offered(size: int) -> list[int]:
    return [way for way, degree in enumerate(DEGREES) if size % degree == 0]


def mixes(plan: StagePlan) -> Iterator[list[PlannedStage]]:
    """All of them, with the plan's cuts and groups."""
    stages = [
        [
            replace(stage, way=ways[0], ways=ways)
            for ways in product(offered(stage.devices), repeat=stage.end - stage.first)
        ]
        for stage in plan.stages
    ]
    return (list(plan) for plan in product(*stages))


def cases() -> Iterator[tuple[Model, StageProblem, StagePlan]]:
    """Plans of four and six devices in groups of 2 and 4, equal and unequal, of little memory."""
    for seed in range(40):
        model, chance = Model(seed), random.Random(seed)
        devices = chance.choice((4, 6))
        slowdowns = (1.0,) * (devices - 2) + (chance.choice((1.0, 1.5)),) * 2
        problem = model.problem(slowdowns, 1e6 * chance.uniform(1.0, 3.0))
        plan = search(problem.only(lambda first, end, size: (size > 1) & (first < end)))
        if plan is not None:
            yield model, problem, plan


def test_no_mix_of_ways_inside_the_stages_is_quicker() -> None:
    quicker = binding = missed = 0
    for model, problem, plan in cases():
        m = plan.micro_batches
        assert model.seconds(problem, list(plan.stages), m) == pytest.approx(plan.seconds)
        best = min(model.seconds(problem, mix, m) for mix in mixes(plan))
        found = mixed(problem, plan, model.inside)
        if found is None:
            missed += best < plan.seconds * (1 - 1e-9)
            continue
        quicker += 1
        assert (found.micro_batches, len(found.stages)) == (m, len(plan.stages))
        assert model.seconds(problem, list(found.stages), m) == pytest.approx(found.seconds)
        assert found.seconds * (1 - found.gap) <= best * (1 + 1e-9)
        assert best <= found.seconds * (1 + 1e-9)
        missed += best < found.seconds * (1 - 1e-9)
        free = replace(problem, limits=(math.inf,) * problem.devices)
        more = mixed(free, plan, model.inside)
        binding += more is not None and more.seconds < found.seconds * (1 - 1e-9)
    assert quicker > 15
    assert binding > 2
    assert missed == 0  # as few shares of each stage are searched, some problem may have one


def test_a_stage_on_one_device_has_one_way() -> None:
    model = Model(0)
    plan = search(model.problem((1.0, 1.0), math.inf).only(lambda i, j, g: (g == 1) & (i < j)))
    assert plan is not None
    assert mixed(model.problem((1.0, 1.0), math.inf), plan, model.inside) is None


def test_ways_that_are_equal_are_one() -> None:
    stage = PlannedStage(2, 5, 4, 1)
    assert stage.way_of == (1, 1, 1)
    assert replace(stage, ways=(1, 0, 2)).way_of == (1, 0, 2)
