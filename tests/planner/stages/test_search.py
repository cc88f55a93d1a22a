"""The search of stages: against every cut, group, way and number of micro-batches."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from synchromesh.planner.stages.problem import (
    PlannedStage,
    StageFacts,
    StageProblem,
    stage_costs,
)
from synchromesh.planner.stages.search import search
from tests.planner.stage_problems import evaluate, every, random_problem


@pytest.mark.parametrize("equal", [True, False])
def test_no_other_plan_is_quicker(equal: bool) -> None:
    fitting = binding = 0
    for seed in range(100):
        chance = random.Random(seed)
        problem = random_problem(seed, chance.randint(1, 5), chance.randint(1, 4), equal)
        plans, numbers = list(every(problem)), problem.micro_batches
        best = min(evaluate(problem, plan, m) for plan in plans for m in numbers)
        found = search(problem)
        if found is None:
            assert best == math.inf
            continue
        assert found.gap == 0.0
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert evaluate(problem, found.stages, found.micro_batches) == pytest.approx(best)
        fitting += 1
        free = replace(problem, limits=(math.inf,) * problem.devices)
        unlimited = search(free)
        assert unlimited is not None
        binding += unlimited.seconds < found.seconds
    assert fitting > 40
    assert binding > 20
    assert fitting < 100


def chain(seconds: list[float], devices: int, **other: object) -> StageProblem:
    """Components whose work is divided by the devices of a group, of nothing else a cost."""
    count, none = len(seconds), np.zeros(len(seconds))

    def facts(size: int, _: int, m: int) -> StageFacts:
        work = np.array(seconds) / size / m
        parts = {"gradient": 100.0 * (size > 1) + none, "update": none}
        held = {"resident": 1.0 + none, "kept": 1.0 / m + none}
        return StageFacts(work / 3, work * 2 / 3, **parts, **held, message=np.zeros(count + 1))

    given = {
        "sizes": tuple(range(1, devices + 1)),
        "limits": (1e9,) * devices,
        "slowdowns": (1.0,) * devices,
        "micro_batches": (4,),
        **other,
    }
    sizes = given["sizes"]
    return StageProblem(
        count,
        **given,  # type: ignore[arg-type]
        costs=lambda m: stage_costs(facts, m, sizes, (1,), count),  # type: ignore[arg-type]
    )


def shape(problem: StageProblem) -> list[tuple[int, int]]:
    """Components and devices of each stage."""
    found = search(problem)
    assert found is not None
    return [(s.end - s.first, s.devices) for s in found.stages]


def test_gradients_that_cost_more_than_a_bubble_make_stages() -> None:
    assert shape(chain([12.0] * 6, 2)) == [(3, 1), (3, 1)]
    found = search(chain([12.0] * 6, 2))
    assert found is not None  # (m + p - 1) t
    assert found.seconds == pytest.approx((4 + 2 - 1) * 9.0)


def test_slow_devices_get_less_work() -> None:
    assert shape(chain([12.0] * 6, 2, slowdowns=(1.0, 2.0))) == [(4, 1), (2, 1)]
    assert shape(chain([12.0] * 6, 2, slowdowns=(2.0, 1.0))) == [(2, 1), (4, 1)]


def test_the_first_stage_holds_most_micro_batches() -> None:
    # (p - s) micro-batches of 1/4 byte a component, besides the byte that it has
    assert shape(chain([12.0] * 6, 2, limits=(4.5, 4.5))) == [(3, 1), (3, 1)]
    assert shape(chain([12.0] * 6, 2, limits=(4.4, 5.0))) == [(2, 1), (4, 1)]
    assert search(chain([12.0] * 6, 2, limits=(4.4, 4.4))) is None


def test_what_a_plan_takes_is_its_equation() -> None:
    problem = chain([8.0, 4.0, 4.0], 4, sizes=(1, 3, 4))
    plan = (PlannedStage(0, 2, 3, 0), PlannedStage(2, 3, 1, 0))
    t = (12.0 / 3 / 4, 4.0 / 4)
    assert evaluate(problem, plan, 4) == pytest.approx(
        sum(t) + max(3 * t[0] + 200 - 8 / 12 * 2 / 3, 3 * t[1])
    )
