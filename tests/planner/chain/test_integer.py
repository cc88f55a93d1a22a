"""The integer program against brute force, and where nothing fits."""

import math

import pytest

from synchromesh.planner.chain import integer
from synchromesh.planner.chain.problem import Option, Problem
from tests.planner.problems import SHAPES, brute_force, random_problem


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [11, 12])
def test_agrees_with_brute_force(shape: str, seed: int) -> None:
    problem = random_problem(seed, SHAPES[shape], options=3)
    least = brute_force(problem, -1)
    quickest = brute_force(problem)
    assert (least is None) == (quickest is None)
    if least is None or quickest is None:
        assert integer.quickest(problem, math.inf) is None
        return
    for limit in (math.inf, (least.memory + quickest.memory) / 2):
        best, found = brute_force(problem, limit), integer.quickest(problem, limit)
        assert best is not None and found is not None
        assert found.seconds == pytest.approx(best.seconds, abs=1e-5)
    assert integer.quickest(problem, least.memory - 1) is None


def test_what_costs_nothing() -> None:
    found = integer.quickest(Problem(((Option(0.0, 0.0),),)), math.inf)
    assert found is not None and found.seconds == 0.0
