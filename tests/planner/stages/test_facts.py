"""Facts of groups of devices: of made-up facts of a model, what stages ask for and take."""

from dataclasses import replace

import pytest

from synchromesh.planner.problem import PartitionCache
from synchromesh.planner.stages.facts import GroupFacts, stage_demands, stage_problem, stage_sizes
from synchromesh.planner.stages.mixes import Searches, StagePlace
from synchromesh.planner.stages.problem import PlannedStage
from synchromesh.planner.uniform import uniform_partitions
from synchromesh.values.profile import Calls, Pattern, Profile
from tests.planner.stage_problems import evaluate
from tests.planner.stages.test_plans import (
    DEVICES,
    ROWS,
    classified,
    classified_profile,
    made,
    profile,
)


def facts_of(told: Profile) -> GroupFacts:
    return GroupFacts(made()[1], told, range(DEVICES))


def test_what_a_stage_takes_is_the_sum_of_its_layers() -> None:
    problem, _ = made()
    told = profile(0.0, message=0.0, tensor=False)
    found = stage_problem(facts_of(told), problem, range(DEVICES), (1.0,) * DEVICES)
    plan = (PlannedStage(0, 5, 3, 0), PlannedStage(5, 8, 1, 0))
    # micro-batches of 16 rows: 6 on a device of the first stage, 16 on the second
    t = (5 * 6 * 3e-3, 3 * 16 * 3e-3)
    assert abs(evaluate(found, plan, 4) - (sum(t) + 3 * max(t))) < 1e-9
    slow = replace(told, calls=Calls(1e-3, -2e-3, 0.25, 0.75, 9.0))
    found = stage_problem(facts_of(slow), problem, range(DEVICES), (1.0,) * DEVICES)
    t = (t[0] - 5e-3 + 1.0, t[1] - 3e-3 + 1.0)
    assert abs(evaluate(found, plan, 4) - (sum(t) + 3 * max(t))) < 1e-9


def test_what_is_measured_for_stages() -> None:
    _, parts = made()
    demands = stage_demands(parts)
    value = 16 * 4
    assert [d for d in demands if d[0] == "send"] == [
        ("send", Pattern(2, size), -(-ROWS // size) * value) for size in (1, 2, 3)
    ]
    groups = {d[1] for d in demands if d[0] == "all_reduce"}
    assert groups == {Pattern(2), Pattern(3)}
    assert stage_sizes(8) == (1, 2, 4, 6, 7)
    assert stage_sizes(1) == ()


def test_one_way_for_all_components_of_a_stage_takes_what_its_search_says() -> None:
    problem, parts = classified()
    facts = GroupFacts(parts, classified_profile(), range(DEVICES))
    stages = stage_problem(facts, problem, range(DEVICES), (1.0,) * DEVICES)
    for first, end, size in ((0, 3, 2), (2, 7, 2), (1, 6, 2)):
        for m in (1, 4):
            place = StagePlace(1.0, float("inf"), m, 1)
            stage, costs = PlannedStage(first, end, size, 0), stages.costs(m)
            inside = facts.inside(stage, m)
            assert inside is not None
            for k, way in enumerate(inside.ways):
                found = Searches(place, stage, inside).mix((k,) * (end - first))
                at = (way, first, end, stages.sizes.index(size))
                assert found.stage == replace(stage, way=way)
                t, x, e = (float(a[at]) for a in (costs.seconds, costs.fill, costs.end))
                assert found.passage == pytest.approx(t + x)
                assert found.slowest == pytest.approx((m - 1) * t + e)


def test_degrees_that_do_not_nest_cross_on_all_ranks_of_a_group() -> None:
    problem = replace(made()[0], devices=12)
    parts = uniform_partitions(PartitionCache(problem))
    of_six = [d for d in stage_demands(parts) if d[0] == "all_to_all"]
    assert of_six == [("all_to_all", Pattern(6), ROWS // 2 * 16 * 4 // 2)]
    assert all(kind in ("send", "all_reduce") for kind, *_ in stage_demands(made()[1]))
