"""Plainer relatives of a plan: what is left out, what is laid out alike, which one is taken."""

import pytest
import torch
from torch import Tensor, nn

from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import decided
from synchromesh.planner.decision.decide import _Deciding, survey
from synchromesh.planner.decision.relatives import relatives
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.uniform import uniform
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
    plans = relatives(uniform(blocks), blocks.problem, Plan.parse(plan))
    assert " | ".join(map(str, plans)) == found


@pytest.fixture
def deciding(blocks: PartitionCache) -> _Deciding:
    facts = Flat(blocks)
    return _Deciding(blocks, facts, survey(blocks, facts))


def made_up(deciding: _Deciding, plan: str) -> list[Candidate]:
    deciding.ask([Plan.parse(plan)])
    return deciding.priced([Plan.parse(plan)])


def test_the_plan_that_is_taken_becomes_plainer_step_by_step(deciding: _Deciding) -> None:
    found = made_up(deciding, "data; 1=zero1; 3=zero1; 5=zero1; 6=zero2")
    more = deciding.plainer(found)
    assert str(decided([*found, *more])[0].plan) in ("data", "zero1")
    assert len(more) <= 3, "only what was taken at some time is shown"
    words = [c.plan.words for c in (*found, *more)]
    assert words == sorted(words, reverse=True)


def test_a_plain_plan_or_one_that_does_not_fit_has_none(deciding: _Deciding) -> None:
    assert deciding.plainer(made_up(deciding, "data")) == []
    mixed = made_up(deciding, "data; 1=zero1; 3=zero1")
    assert deciding.plainer([Candidate(mixed[0].plan, mixed[0].time, (), False, "")]) == []


def test_what_is_clearly_slower_is_left(deciding: _Deciding) -> None:
    """Every program takes a second a row: layers of all rows take twice as long as of half."""
    assert deciding.plainer(made_up(deciding, "tensor; 1-5=data")) == []
