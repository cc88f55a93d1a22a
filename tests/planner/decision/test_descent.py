"""Descent by exact prices: where it goes, when it ends, and what becomes of it in a decision."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.cost.step_time import StepTime
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import decided
from synchromesh.planner.decision.decide import _Decision, decide, survey
from synchromesh.planner.decision.descent import TUNING, descended, neighbours
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.uniform import uniform_partitions
from synchromesh.trace.capture.capture import trace
from synchromesh.values.plan import Plan
from tests.planner.decision.test_decide import DEVICES, ROWS, Flat
from tests.planner.decision.test_simplify import loss

LIMIT = 100.0


def cache(layers: int, limit: float = LIMIT) -> PartitionCache:
    """Equal layers `0`, `1` ... and a head of another size, which is the last one."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)), nn.Linear(16, 8))
    step = trace(model, loss, torch.randn(ROWS, 16), training=True)
    return PartitionCache(PlanningProblem(step, ROWS, DEVICES, limits=(limit,) * DEVICES))


def candidate(plan: Plan, seconds: float, peak: float) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    memory = (PeakMemory(0, int(peak)),)
    return Candidate(plan, time, memory, peak <= LIMIT, "")


class Line:
    """Plans in a row, each a neighbour of the next, with their seconds and bytes."""

    def __init__(self, rows: Sequence[tuple[float, float]]) -> None:
        self.rows = rows
        self.asked: list[int] = []

    def plan(self, place: int) -> Plan:
        return Plan.parse(f"single; p{place}=tensor")

    def place(self, plan: Plan) -> int:
        return int(plan.overrides[0].pattern[1:])

    def near(self, plan: Plan) -> list[Plan]:
        here = self.place(plan)
        return [self.plan(p) for p in (here - 1, here + 1) if 0 <= p < len(self.rows)]

    def price(self, plans: Sequence[Plan]) -> list[Candidate]:
        self.asked += map(self.place, plans)
        return [candidate(plan, *self.rows[self.place(plan)]) for plan in plans]


@pytest.mark.parametrize(
    ("rows", "begins", "order"),
    [
        ("5/90 4/90 3/90 6/90", 0, [1, 2, 3]),  # downhill to the end
        ("5/90 3/110 2/95 9/90", 0, [1, 2, 3]),  # over what lacks a tenth: 3 x 1.21 < 5
        ("5/90 9/90 7/90", 1, [0, 2]),  # both sides of where it begins
    ],
)
def test_the_least_merit_goes_on(rows: str, begins: int, order: list[int]) -> None:
    line = Line([tuple(map(float, row.split("/"))) for row in rows.split()])  # type: ignore[misc]
    (first,) = line.price([line.plan(begins)])
    problem = cache(1).problem
    found = descended([first], line.near, line.price, problem)
    assert line.asked[1:] == order == [line.place(c.plan) for c in found]


def test_no_more_is_priced_than_is_allowed() -> None:
    line = Line([(1000.0 - i, 90.0) for i in range(300)])
    first = line.price([line.plan(0)])
    problem = cache(1).problem
    assert len(descended(first, line.near, line.price, problem)) == TUNING.prices
    many = cache(TUNING.work // TUNING.fewest).problem  # one component too many
    assert descended(first, line.near, line.price, many) == []


def test_one_thing_changes_in_one_layout_or_in_equal_programs() -> None:
    """Of layer 0 nobody asks for the gradient of what it reads: its program is another."""
    blocks = cache(2)
    parts, levels = uniform_partitions(blocks), ("none", "optimizer")
    found = neighbours(parts, blocks.problem, levels, Plan.parse("data; @pieces=4"))
    assert " | ".join(map(str, found)) == (
        "tensor | zero1 | data:recompute=yes | "
        "data; 0=tensor | data; 0=zero1 | data; 0=data:recompute=yes | "
        "data; 1=tensor | data; 1=zero1 | data; 1=data:recompute=yes | "
        "data; 2=tensor | data; 2=zero1 | data; 2=data:recompute=yes"
    )
    mixed = neighbours(parts, blocks.problem, levels, Plan.parse("tensor; 2=data"))
    assert {"data", "tensor"} <= set(map(str, mixed)), "those of one layout change together"
    cut = neighbours(parts, blocks.problem, levels, Plan.parse("data; @micro_batches=2"))
    assert cut == [Plan.parse("data"), *(replace(plan, micro_batches=2) for plan in found)]
    for other in ("single", "data; @ranks=0", "data; @stages=0:0/1:2"):
        assert neighbours(parts, blocks.problem, levels, Plan.parse(other)) == []


def test_a_decision_measures_nothing_for_it_and_gets_no_slower() -> None:
    blocks = cache(2, 1e9)
    facts = Flat(blocks)
    known = survey(facts)
    decision = _Decision(facts, known)
    plans = [Plan.parse("tensor; 1-2=data"), Plan.parse("tensor")]
    decision.ask(plans)
    found = decision.candidates = decision.priced(plans)
    count, asked = len(found), len(facts.asked)
    assert decision.descend()
    found, better = decision.candidates[:count], decision.candidates[count:]
    assert len(facts.asked) == asked, "what is measured is asked for by all ranks, not by one"
    assert [str(c.plan) for c in better] == ["data"]
    assert better[0].seconds < decided(found)[0].seconds
    assert not decision.descend()
    assert decide(facts, known).chosen.plan == decide(facts, known).chosen.plan
