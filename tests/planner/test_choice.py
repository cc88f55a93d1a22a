"""Plans on fewer devices, and which of the candidates is taken."""

from synchromesh.cost.step_time import StepTime
from synchromesh.plan import Plan
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import decided, fewer
from synchromesh.profile import Compute, Curve, Memory, Profile


def profile(*seconds: float) -> Profile:
    """Ranks that take so many seconds."""
    curves = tuple(Curve(((8.0, s),)) for s in seconds)
    return Profile(len(seconds), {"a": Compute(curves, curves, Memory())})


def texts(plans: list[Plan]) -> list[str]:
    return [str(p) for p in plans]


def test_fewer_devices_are_the_largest_divisors() -> None:
    best = Plan.parse("data; head=tensor; @pieces=4")
    found = texts(fewer([best], 12, profile(*[1.0] * 12)))
    assert found == [
        "data; head=tensor; @ranks=0-5", "data; @ranks=0-5",
        "data; head=tensor; @ranks=0-3", "data; @ranks=0-3",
    ]  # fmt: skip
    assert fewer([best], 3, profile(1.0, 1.0, 1.0)) == [], "one alone is `single`"


def test_slow_devices_are_left_out() -> None:
    found = texts(fewer([Plan.parse("data; head=tensor")], 4, profile(1.0, 3.0, 1.1, 1.0)))
    assert found[:2] == ["data; head=tensor; @ranks=0,2,3", "data; @ranks=0,2,3"]
    assert "data; @ranks=0,2" in found


def test_a_plan_that_does_not_run_on_fewer_devices_leaves_its_place_to_the_next() -> None:
    plans = [Plan.parse(t) for t in ("hybrid:tensor=2", "single", "data; head=tensor", "tensor")]
    found = texts(fewer(plans, 4, profile(1.0, 1.0, 1.0, 3.0)))
    assert found[:3] == ["data; head=tensor; @ranks=0-2", "tensor; @ranks=0-2", "data; @ranks=0-2"]


def test_a_degree_that_does_not_divide_fewer_devices_is_no_candidate() -> None:
    found = texts(fewer([Plan.parse("hybrid:tensor=4")], 8, profile(*[1.0] * 8)))
    assert found == ["hybrid:tensor=4; @ranks=0-3", "data; @ranks=0-3", "data; @ranks=0,1"]


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
    assert decided([candidate("single", 1.03), near[1]])[0].plan == near[1].plan
