"""Plans that need less memory than one that does not fit."""

from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.saving import savings
from synchromesh.values.plan import Plan


def candidate(text: str, seconds: float, fits: bool) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    return Candidate(Plan.parse(text), time, (), fits, "")


def test_what_fits_asks_for_nothing() -> None:
    assert savings([candidate("data", 1.0, True), candidate("tensor", 2.0, False)]) == []


def test_every_level_of_a_quicker_plan_is_asked_for() -> None:
    found = savings([candidate("data", 1.0, False), candidate("tensor", 2.0, True)])
    assert list(map(str, found)) == [
        "data:recompute=yes", "zero1", "zero1:recompute=yes", "sharded-data",
        "sharded-data:recompute=yes",
    ]  # fmt: skip


def test_tensor_ranks_have_nothing_to_shard() -> None:
    found = savings([candidate("tensor", 1.0, False), candidate("single", 2.0, False)])
    assert list(map(str, found)) == ["tensor:recompute=yes", "single:recompute=yes"]


def test_layouts_of_components_and_stages_are_kept() -> None:
    text = "hybrid:tensor=2; head=data; @stages=0-1:a/2-3:b; @micro_batches=4"
    found = list(map(str, savings([candidate(text, 1.0, False)])))
    assert len(found) == 7
    assert found[3] == (
        "hybrid:tensor=2,states=gradients; head=zero2; @stages=0,1:a/2,3:b; @micro_batches=4"
    )
