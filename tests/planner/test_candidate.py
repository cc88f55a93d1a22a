"""Candidates: priced, refused by name, kept below limits."""

from dataclasses import replace

import pytest

from synchromesh.cost.step_time import step_time
from synchromesh.planner.candidate import (
    Candidate,
    other_pieces,
    planned_step,
    price,
    with_pieces,
)
from synchromesh.planner.problem import Headroom, PartitionCache, PlanningProblem
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.schedule import PIECES
from tests.cost.plans import flat
from tests.models import traced

PARTITIONS = PartitionCache(PlanningProblem(traced("gpt2"), 8, 2))


def profile(text: str) -> Profile:
    plan = Plan.parse(text)
    return flat(planned_step(PARTITIONS, plan), 1.0, 0.5)


def test_a_price_is_the_step_time() -> None:
    plan = Plan.parse("tensor; @pieces=1")
    found = price(PARTITIONS, plan, profile("tensor"))
    placed = planned_step(PARTITIONS, plan)
    assert found.time == step_time(placed, profile("tensor"), 1)
    assert found.fits and found.reason == "" and len(found.memory) == 2
    assert found.to_dict()["step_seconds"] == found.seconds > 0


def test_pieces_are_as_the_plan_says_or_the_better() -> None:
    told = profile("tensor")
    seconds = {
        n: price(PARTITIONS, Plan.parse(f"tensor; @pieces={n}"), told).seconds for n in (1, 4)
    }
    free = price(PARTITIONS, Plan.parse("tensor"), told)
    assert free.seconds == min(seconds.values())
    assert free.time is not None
    written = replace(free.plan, pieces=free.time.pieces)
    assert with_pieces(free, PARTITIONS).plan == written
    single = price(PARTITIONS, Plan.parse("single"), profile("single"))
    assert with_pieces(single, PARTITIONS) == single, "nothing is sent that pieces could hide"


def test_the_other_number_of_pieces_is_a_plan_where_rows_suffice() -> None:
    told = profile("tensor")
    one, four = (price(PARTITIONS, Plan.parse(f"tensor; @pieces={n}"), told) for n in (1, PIECES))
    assert other_pieces(four, PARTITIONS) == one.plan
    rows = PARTITIONS.problem.rows  # of each rank under `tensor`
    assert other_pieces(one, PARTITIONS) == (four.plan if rows >= PIECES else None)
    assert other_pieces(price(PARTITIONS, Plan.parse("tensor"), told), PARTITIONS) is None


def test_stages_are_priced_by_their_schedule() -> None:
    names = PARTITIONS.problem.step.chain.names
    text = f"data; @stages=0:{names[0]}/1:{names[len(names) // 2]}; @micro_batches={{}}"
    one, four = text.format(1), text.format(4)
    told = flat(planned_step(PARTITIONS, Plan.parse(one)), 1.0, 0.0)
    found = [price(PARTITIONS, Plan.parse(plan), told) for plan in (one, four)]
    assert all(c.fits and len(c.memory) == 2 for c in found)
    # each component takes 3 seconds whatever its rows, the longer stage's follow one another
    halves = len(names) // 2, len(names) - len(names) // 2
    assert found[0].seconds == pytest.approx(3 * len(names))
    assert found[1].seconds == pytest.approx(3 * (sum(halves) + 3 * max(halves)))
    assert with_pieces(found[1], PARTITIONS) == found[1]


def test_what_cannot_be_priced_says_why() -> None:
    unknown = price(PARTITIONS, Plan.parse("tensor"), profile("data"))
    assert unknown.time is None and not unknown.fits and "was not measured" in unknown.reason
    assert unknown.seconds == float("inf") and unknown.to_dict()["step_seconds"] is None
    wrong = price(PARTITIONS, Plan.parse("data; nowhere=tensor"), profile("data"))
    assert wrong.time is None and "matches no component" in wrong.reason


def test_limits_name_the_rank_that_lacks_most() -> None:
    told = profile("data")

    def limited(text: str, *limits: float) -> Candidate:
        problem = replace(PARTITIONS.problem, limits=limits)
        return price(PartitionCache(problem), Plan.parse(text), told)

    peak = limited("data").memory[0].peak
    assert limited("data", peak, peak).fits
    found = limited("data", peak, peak - 2000)
    assert not found.fits and found.reason == "rank 1 lacks 2.0 KB" and found.time is not None
    swapped = limited("data; @ranks=1,0", peak - 3000, peak - 2000)
    assert swapped.reason == "rank 0 lacks 3.0 KB"


def test_what_the_headroom_has_is_not_lacking() -> None:
    room = Headroom.of(1e6, "250kB")
    problem = replace(PARTITIONS.problem, headroom=room)
    told = profile("data")
    peak = price(PARTITIONS, Plan.parse("data"), told).memory[0].peak

    def reason(limit: float) -> str:
        tight = PartitionCache(replace(problem, limits=(limit, limit)))
        return price(tight, Plan.parse("data"), told).reason

    assert reason(peak) == ""
    assert reason(peak - 1000) == "rank 1 takes 1.0 KB of its headroom"
    problem = replace(problem, headroom=Headroom.of(1e6, "999B"))
    assert reason(peak - 1000) == "rank 1 lacks 1.0 KB"
