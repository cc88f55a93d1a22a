"""Which of the candidates is taken."""

from synchromesh.cost.step_time import StepTime
from synchromesh.plan import Plan
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import decided


def candidate(plan: str, seconds: float, fits: bool = True) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, 0.0, 0.0, 0.0, 1)
    return Candidate(Plan.parse(plan), time, (), fits, "")


def test_a_plain_plan_is_taken_where_a_mixed_one_is_hardly_quicker() -> None:
    mixed, plain = candidate("data; head=tensor", 0.99), candidate("tensor", 1.0)
    assert decided([mixed, plain])[0].plan == plain.plan
    assert decided([candidate("data; head=tensor", 0.9), plain])[0].plan == mixed.plan
    assert decided([mixed, candidate("tensor", 1.0, fits=False)])[0].plan == mixed.plan
    order = [
        "single",
        "data",
        "tensor",
        "hybrid:tensor=2",
        "data; head=tensor",
        "data; @ranks=0,1",
    ]
    near = [candidate(plan, 1.0 - 0.003 * n) for n, plan in enumerate(order)]
    for n, plan in enumerate(order):
        assert str(decided(near[n:])[0].plan) == plan, "predictions are not that exact"
    assert decided([candidate("single", 1.06), near[1]])[0].plan == near[1].plan
