"""Random problems of the planner: chains, residuals, U-Nets, towers, values read by many."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np

from synchromesh.planner.chain.problem import (
    BATCH,
    ChainPlan,
    Option,
    PricedEdge,
    Prices,
    Problem,
    evaluate,
)

Edges = Sequence[tuple[int, tuple[int, ...]]]

CHAIN: Edges = [(BATCH, (0,)), (0, (1,)), (1, (2,)), (2, (3,)), (3, (4,)), (4, (5,))]
RESIDUAL: Edges = [(BATCH, (0,)), (0, (1, 2)), (1, (2,)), (2, (3, 4)), (3, (4, 5)), (4, (5,))]
UNET: Edges = [  # three levels: 0 and 6, 1 and 5, 2 and 4, and 3 below
    (BATCH, (0,)), (0, (1, 6)), (1, (2, 5)), (2, (3, 4)), (3, (4,)), (4, (5,)), (5, (6,)),
]  # fmt: skip
TOWERS: Edges = [  # 0 1 2 and 3 4, joined by 5; both read the batch
    (BATCH, (0,)), (BATCH, (3, 5)), (0, (1,)), (1, (2,)), (3, (4,)), (2, (5,)), (4, (5,)),
]  # fmt: skip
MANY: Edges = [
    (BATCH, (0, 1, 4)),
    (0, (1, 2, 3, 4, 5)),
    (1, (2,)),
    (2, (3,)),
    (3, (4,)),
    (4, (5,)),
]
SHAPES = {
    "chain": CHAIN, "residual": RESIDUAL, "U-Net": UNET, "towers": TOWERS, "read by many": MANY,
}  # fmt: skip


def random_prices(chance: random.Random, borders: int, forms: int, forbidden: float) -> Prices:
    def one(form: int, source: int, scale: float) -> float:
        if chance.random() < forbidden and form != source:
            return math.inf
        return 0.0 if form == source else round(scale * chance.random(), 3)

    tables = [
        np.array([[one(f, a, scale) for f in range(forms)] for a in range(borders)])
        for scale in (1.0, 1.5)
    ]
    return Prices(*tables, tuple(chance.randrange(forms) for _ in range(borders)))


def random_problem(
    seed: int, edges: Edges, options: int = 4, borders: int = 3, forbidden: float = 0.15
) -> Problem:
    chance = random.Random(seed)

    def option() -> Option:
        gradient = chance.choice((0.0, round(2 * chance.random(), 3)))
        return Option(
            round(chance.random(), 3), round(1.5 * chance.random(), 3), gradient,
            round(0.3 * chance.random(), 3), chance.randrange(1000), chance.randrange(borders),
        )  # fmt: skip

    count = 1 + max(max(targets) for _, targets in edges)
    components = tuple(tuple(option() for _ in range(options)) for _ in range(count))
    links = tuple(
        PricedEdge(
            source, targets, random_prices(chance, borders, chance.choice((2, 3)), forbidden)
        )
        for source, targets in edges
    )
    return Problem(components, links)


def brute_force(problem: Problem, limit: float = math.inf) -> ChainPlan | None:
    """The quickest of all choices within the limit, else the quickest of the lightest."""
    every = []
    for choice in itertools.product(*(range(len(options)) for options in problem.components)):
        seconds, memory = evaluate(problem, choice)
        if seconds < math.inf:
            every.append((seconds, memory, choice))
    if not every:
        return None
    fitting = [plan for plan in every if plan[1] <= limit]
    least = min(memory for _, memory, _ in every)
    seconds, memory, choice = min(fitting or [plan for plan in every if plan[1] == least])
    return ChainPlan(choice, seconds, memory, within=bool(fitting))
