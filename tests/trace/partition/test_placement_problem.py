"""The integer program against brute force, on small random problems; random assignments are
valid."""

import itertools
import random
from functools import partial

import pytest

from synchromesh.trace.partition.placement_problem import (
    PlacementProblem,
    UnitOption,
    ValueFlow,
    choose,
)
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement, shard
from tests.random_placements import sample

STATES = (REPLICATED, PARTIAL, shard(0), shard(1))


def random_problem(seed: int) -> PlacementProblem:
    """A parameter, three operators in a row that all read it, and a value that two of them
    share."""
    chance = random.Random(seed)
    problem = PlacementProblem()
    parameter = problem.unit(
        [
            UnitOption((), (s,), 100 * chance.random(), 0.5 if s.sharded else 1.0)
            for s in STATES
            if s != PARTIAL
        ]
    )
    units = [problem.unit([UnitOption((), (s,), 100 * chance.random()) for s in STATES])]
    for reads in (2, 2, 3):
        options = {}
        for _ in range(6):
            states = tuple(chance.choice(STATES) for _ in range(reads))
            options[states] = UnitOption(states, (chance.choice(STATES),), 500 * chance.random())
        whole = (REPLICATED,) * reads
        options.setdefault(whole, UnitOption(whole, (REPLICATED,), 500.0))
        units.append(problem.unit(list(options.values())))
    problem.counts = [1, *(chance.choice((1, 3)) for _ in units)]
    prices = {(a, b): 2 + 300 * chance.random() for a in STATES for b in STATES}

    def move(a: Placement, b: Placement) -> float:
        return prices[a, b]

    def held(a: Placement, b: Placement) -> float | None:
        return 0.0 if (a, b) == (REPLICATED, PARTIAL) else None

    rigid = partial(ValueFlow, price=held, rigid=True)
    problem.flow("w", (parameter, 0), [(u, 0) for u in units[1:]], rigid)
    readers = ((units[1], 1), (units[2], 1), (units[3], 1))
    problem.flow("x", (units[0], 0), readers, partial(ValueFlow, price=move))
    problem.flow("y", (units[2], 0), [(units[3], 2)], partial(ValueFlow, price=move))
    return problem


def price_of(problem: PlacementProblem, taken: list[int]) -> float | None:
    total = 0.0
    for i, k in enumerate(taken):
        total += problem.options[i][k].price * problem.counts[i]
    for flow in problem.flows.values():
        unit, place = flow.maker
        a = problem.options[unit][taken[unit]].makes[place]
        wanted = {problem.options[u][taken[u]].reads[slot] for u, slot in flow.readers} - {a}
        for b in wanted:  # each move is paid once for all readers
            price = flow.price(a, b)
            if price is None:
                return None
            total += price * flow.count
    return total


def best(problem: PlacementProblem) -> tuple[float, float]:
    """(bytes held, price) of the best assignment by trying all."""
    found = []
    for taken in itertools.product(*(range(len(o)) for o in problem.options)):
        price = price_of(problem, list(taken))
        if price is not None:
            found.append((problem.options[0][taken[0]].held_bytes, price))
    return min(found)


@pytest.mark.parametrize("seed", range(12))
def test_cheapest_of_the_finest(seed: int) -> None:
    problem = random_problem(seed)
    taken = choose(problem, lambda unit: unit == 0)
    price = price_of(problem, taken)
    assert price is not None
    held, least = best(problem)
    assert problem.options[0][taken[0]].held_bytes == held
    assert price == pytest.approx(least)


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_valid(seed: int) -> None:
    problem = random_problem(seed)
    taken = {tuple(sample(problem, random.Random(s))) for s in range(8)}
    assert all(price_of(problem, list(t)) is not None for t in taken)
    assert len(taken) > 1
