"""Random problems of stages, and every plan that they have."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product

import numpy as np

from synchromesh.planner.stages.problem import PlannedStage, StageCosts, StageProblem

WAYS = 2


def random_problem(seed: int, components: int, devices: int, equal: bool = True) -> StageProblem:
    """Times without any law; limits that some plans keep and others do not."""
    chance = np.random.default_rng(seed)
    sizes = tuple(range(1, devices + 1)) if seed % 3 else tuple(sorted({1, devices}))
    shape = (WAYS, components, components + 1, len(sizes))
    seconds, fill, end, resident, kept = (chance.uniform(0.0, 1.0, shape) for _ in range(5))
    inside = np.arange(components)[:, None] < np.arange(components + 1)
    possible = inside[:, :, None] & (chance.uniform(size=shape) < 0.9)

    @cache
    def costs(m: int) -> StageCosts:
        busy = np.where(possible, seconds / m + 0.05, math.inf)
        return StageCosts(busy, 0.2 * fill, end, resident, kept / m)

    draw = random.Random(seed)
    slowdowns = [1.0] * devices if equal else sorted(draw.choices((1.0, 1.5, 2.0), k=devices))
    limit = draw.uniform(0.2, 1.8)
    limits = [limit * (1.0 if equal else 1.0 + 0.3 * (d % 2)) for d in range(devices)]
    return StageProblem(components, sizes, tuple(limits), tuple(slowdowns), (1, 2, 4), costs)


def every(problem: StageProblem) -> Iterator[tuple[PlannedStage, ...]]:
    """All cuts, with all groups and ways."""
    count = problem.components
    for p in range(1, count + 1):
        groups = [g for g in product(problem.sizes, repeat=p) if sum(g) == problem.devices]
        for inner in combinations(range(1, count), p - 1):
            borders = list(zip((0, *inner), (*inner, count), strict=True))
            for sizes, ways in product(groups, product(range(WAYS), repeat=p)):
                yield tuple(
                    PlannedStage(i, j, g, w)
                    for (i, j), g, w in zip(borders, sizes, ways, strict=True)
                )


def evaluate(problem: StageProblem, plan: Sequence[PlannedStage], micro_batches: int) -> float:
    """Seconds of a step under 1F1B; inf where memory does not suffice."""
    costs = problem.costs(micro_batches)
    total, slowest, start = 0.0, 0.0, 0
    for s, stage in enumerate(plan):
        at = (stage.way, stage.first, stage.end, problem.sizes.index(stage.devices))
        slowdown, limit = problem.kind(start, stage.devices)
        held = min(len(plan) - s, micro_batches) * costs.kept[at]
        if costs.resident[at] + held > limit or np.isinf(costs.seconds[at]):
            return float("inf")
        seconds = slowdown * costs.seconds[at]
        total += seconds + costs.fill[at]
        slowest = max(slowest, (micro_batches - 1) * seconds + costs.end[at])
        start += stage.devices
    return float(total + slowest)
