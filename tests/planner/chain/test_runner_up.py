"""Runners-up against brute force over the plans with another border."""

import itertools

import pytest

from synchromesh.planner.chain.problem import evaluate
from synchromesh.planner.chain.runner_up import runners_up
from synchromesh.planner.chain.search import search
from tests.planner.problems import SHAPES, random_problem


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_plan_with_another_border(shape: str, part: float) -> None:
    problem = random_problem(23, SHAPES[shape], options=3, forbidden=0.05)
    free = search(problem)
    least = search(problem, -1)
    limit = least.memory + part * (free.memory - least.memory)
    found = search(problem, limit)
    every = [
        (*evaluate(problem, choice), choice)
        for choice in itertools.product(*(range(len(o)) for o in problem.components))
    ]
    for i, other in enumerate(runners_up(problem, found, limit)):
        border = problem.components[i][found.choice[i]].border
        best = min(
            (seconds for seconds, memory, choice in every
             if memory <= limit and problem.components[i][choice[i]].border != border),
            default=float("inf"),
        )  # fmt: skip
        if other is None:
            assert best == float("inf")
            continue
        assert problem.components[i][other.choice[i]].border != border
        assert other.memory <= limit
        assert other.seconds * (1 - other.gap) - 1e-9 <= best <= other.seconds + 1e-9
        assert other.gap < 0.05


def test_alternatives_are_different_and_in_order() -> None:
    problem = random_problem(22, SHAPES["U-Net"], forbidden=0.0)
    found = search(problem, most=4)
    choices = [found.choice, *(other.choice for other in found.alternatives)]
    assert len(set(choices)) == 5
    seconds = [found.seconds, *(other.seconds for other in found.alternatives)]
    assert seconds == sorted(seconds)
