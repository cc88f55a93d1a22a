"""Plans that need less memory than one that does not fit."""

from dataclasses import replace

import pytest

from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.planning_problem import PartitionCache, PlanningProblem
from synchromesh.planner.saving import nearest_lacking, savings
from synchromesh.planner.uniform import uniform
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from tests.models import traced
from tests.planner.test_assemble import profiled


def candidate(text: str, seconds: float, fits: bool, update: float = 0.0) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, update, 0.0, 0.0, 1)
    return Candidate(Plan.parse(text), time, (), fits, "")


def test_what_fits_and_is_quickest_asks_for_nothing() -> None:
    found = [candidate("data", 1.0, True), candidate("tensor", 2.0, False)]
    assert nearest_lacking(found, ()) is None


def test_the_quickest_plan_that_lacks_memory_comes_first() -> None:
    found = [candidate("tensor", 2.0, False), candidate("data", 1.0, False)]
    assert nearest_lacking(found, ()) is found[1]
    assert nearest_lacking(found, {found[1].plan}) is found[0]
    assert nearest_lacking(found, {c.plan for c in found}) is None


def test_sharded_states_leave_less_to_update() -> None:
    fitting = candidate("tensor", 1.0, True)
    assert nearest_lacking([fitting, candidate("data", 1.2, False, update=0.3)], ())
    assert nearest_lacking([fitting, candidate("data", 1.2, False, update=0.1)], ()) is None


@pytest.fixture
def facts() -> tuple[PartitionCache, Profile]:
    """Of four devices."""
    partitions = PartitionCache(PlanningProblem(traced("gpt2"), 12, 4, limits=(1e12,) * 4))
    return partitions, profiled(uniform(partitions))


def texts(facts: tuple[PartitionCache, Profile], plan: str, limit: float = 1e12) -> list[str]:
    partitions, profile = facts
    partitions.problem = replace(partitions.problem, limits=(limit,) * 4)
    anything = next(iter(profile.compute.values()))
    programs = [c.program for c in partitions.partition(Plan.parse(plan)).components]
    profile = replace(profile, compute=dict.fromkeys(programs, anything) | dict(profile.compute))
    return list(map(str, savings(partitions, Plan.parse(plan), profile)))


def test_no_more_is_saved_than_must_be(facts: tuple[PartitionCache, Profile]) -> None:
    assert texts(facts, "data") == ["zero1", "data:recompute=yes"]
    assert texts(facts, "data", 0.0) == []


def test_tensor_ranks_have_nothing_to_shard(facts: tuple[PartitionCache, Profile]) -> None:
    assert texts(facts, "tensor") == ["tensor:recompute=yes"]
    assert texts(facts, "single") == ["single:recompute=yes"]


def test_layouts_of_components_and_stages_are_kept(
    facts: tuple[PartitionCache, Profile],
) -> None:
    assert texts(facts, "hybrid:tensor=2; lm_head=data") == [
        "hybrid:tensor=2,states=optimizer; lm_head=zero1",
        "hybrid:tensor=2,recompute=yes; lm_head=data:recompute=yes",
    ]
    first, *_, last = facts[0].problem.names
    stages = f"@stages=0,1:{first}/2,3:{last}; @micro_batches=2"
    assert texts(facts, f"data; {stages}")[0] == f"zero1; {stages}"
