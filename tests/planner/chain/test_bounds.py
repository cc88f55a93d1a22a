"""Bounds are below every plan; the longest critical path is the step time."""

import math
import random

import pytest

from synchromesh.planner.chain.bounds import bound
from synchromesh.planner.chain.frontier import graph
from synchromesh.planner.chain.problem import evaluate
from synchromesh.planner.chain.table import table
from tests.planner.problems import SHAPES, random_problem


@pytest.mark.parametrize("most", [4, 300_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_below_every_plan(shape: str, most: int) -> None:
    problem = random_problem(5, SHAPES[shape], forbidden=0.0)
    chance = random.Random(0)
    limit = sum(chance.choice(options).memory for options in problem.components)
    states = graph(table(problem), most)
    free, bounded = bound(states, math.inf), bound(states, limit)
    assert free is not None and bounded is not None
    assert bounded[0].lower >= free[0].lower - 1e-9
    for _ in range(300):
        seconds, memory = evaluate(problem, [chance.randrange(len(o)) for o in problem.components])
        assert free[0].lower <= seconds + 1e-9
        assert memory > limit or bounded[0].lower <= seconds + 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_the_longest_critical_path_is_the_step_time(shape: str) -> None:
    problem = random_problem(6, SHAPES[shape], forbidden=0.0)
    found = bound(graph(table(problem)), math.inf)
    assert found is not None
    for plan in found[1]:
        assert plan.paths.max() == pytest.approx(evaluate(problem, plan.options)[0], rel=1e-12)
