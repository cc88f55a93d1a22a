"""Plainer relatives of a plan: what is left out, what is laid out alike, which one is taken."""

import pytest
import torch
from torch import Tensor, nn

from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import decided
from synchromesh.planner.decision.decide import _Decision, survey
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.uniform import uniform_partitions
from synchromesh.planner.wording import relatives
from synchromesh.trace.capture.capture import trace
from synchromesh.values.plan import Plan
from tests.planner.decision.test_decide import DEVICES, ROWS, Flat


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def blocks() -> PartitionCache:
    """Six equal layers `0` to `5`, and a head of another size."""
    layers = [nn.Linear(16, 16) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(16, 8))
    step = trace(model, loss, torch.randn(ROWS, 16), training=True)
    assert step.chain.names == tuple("0123456")
    return PartitionCache(PlanningProblem(step, ROWS, DEVICES))


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("data", ""),
        ("data; 6=tensor", "data"),
        (  # one pattern less; in runs. Of layer 0 nobody asks for the gradient of what it reads:
            # its program is another
            "data; 1=zero1; 3=zero1",
            "data; 3=zero1 | data; 1=zero1 | data; 1-2=zero1",
        ),
        (
            "zero1; 1=data; 4=data; 6=tensor",
            "zero1; 4=data; 6=tensor | zero1; 1=data; 6=tensor | zero1; 1=data; 4=data | "
            "zero1; 1-2=data; 6=tensor",
        ),
        (  # a plan with stages keeps its layouts
            "data; 1-2=zero1; 6=data:recompute=yes; @stages=0:0/1:4",
            "data; 6=data:recompute=yes; @stages=0:0/1:4 | data; 1-2=zero1; @stages=0:0/1:4",
        ),
    ],
)
def test_relatives(blocks: PartitionCache, plan: str, found: str) -> None:
    plans = relatives(uniform_partitions(blocks), blocks.problem, Plan.parse(plan))
    assert " | ".join(map(str, plans)) == found


@pytest.fixture
def decision(blocks: PartitionCache) -> _Decision:
    facts = Flat(blocks)
    return _Decision(facts, survey(facts))


def made_up(decision: _Decision, plan: str) -> list[Candidate]:
    decision.ask([Plan.parse(plan)])
    return decision.priced([Plan.parse(plan)])


def simplified(decision: _Decision, found: list[Candidate]) -> list[Candidate]:
    """What is taken in place of the best of `found`, step by step."""
    decision.candidates = [*found]
    decision.simplify()
    return decision.candidates[len(found) :]


def test_the_plan_that_is_taken_becomes_plainer_step_by_step(decision: _Decision) -> None:
    found = made_up(decision, "data; 1=zero1; 3=zero1; 5=zero1; 6=zero2")
    more = simplified(decision, found)
    assert str(decided([*found, *more])[0].plan) in ("data", "zero1")
    assert len(more) <= 3, "only what was taken at some time is shown"
    words = [c.plan.words for c in (*found, *more)]
    assert words == sorted(words, reverse=True)


def test_a_plain_plan_or_one_that_does_not_fit_has_none(decision: _Decision) -> None:
    assert simplified(decision, made_up(decision, "data")) == []
    mixed = made_up(decision, "data; 1=zero1; 3=zero1")
    lacking = Candidate(mixed[0].plan, mixed[0].time, (), False, "")
    assert simplified(decision, [lacking]) == []


def test_what_is_clearly_slower_is_left(decision: _Decision) -> None:
    """Every program takes a second a row: layers of all rows take twice as long as of half."""
    assert simplified(decision, made_up(decision, "tensor; 1-5=data")) == []
