"""Plans by the devices' slowdowns, and on fewer devices."""

import pytest

from synchromesh.cost.step_time import computing
from synchromesh.planner.candidate import Candidate, planned_step, price
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.unequal import fewer, shared, widened
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Pattern, Profile
from tests.cost.plans import flat
from tests.models import traced

ROWS, DEVICES = 64, 4
PARTITIONS = PartitionCache(PlanningProblem(traced("gpt2"), ROWS, DEVICES))


def timed(text: str, *paces: tuple[float, float]) -> Profile:
    """Ranks whose programs take so many seconds whatever the rows, and so many a row."""
    plan = Plan.parse(text)
    made = PARTITIONS.partition(plan)

    def curves(of: int) -> tuple[Curve, ...]:
        return tuple(Curve(((0.0, f / of), (1.0, (f + s) / of))) for f, s in paces)

    half = curves(2 * len(made.components))
    found = {c.program: Compute(half, half, Memory()) for c in made.components}
    return Profile(DEVICES, found)


def rows(text: str, profile: Profile) -> tuple[int, ...] | None:
    found = shared(PARTITIONS, Plan.parse(text), profile)
    return None if found is None else found.rows


def test_rows_are_shared_by_speed() -> None:
    usual, slow = (0.0, 1.0), (0.0, 4.0)
    assert rows("data", timed("data", usual, usual, slow, usual)) == (4, 4, 1, 4)
    assert rows("data", timed("data", usual, (0.0, 1.1), slow, usual)) == (64, 64, 17, 64)
    assert rows("data", timed("data", usual, usual, (0.0, 1.2), usual)) is None, "noise"
    # two ranks of a data index: the slower of them counts
    told = timed("hybrid:tensor=2", usual, usual, slow, usual)
    assert rows("hybrid:tensor=2", told) == (4, 1)


def test_what_does_not_shrink_with_rows_counts() -> None:
    told = timed("data", *[(1.0, 1.0)] * 3, (9.0, 1.0))
    found = shared(PARTITIONS, Plan.parse("data"), told)
    assert found is not None and found.rows is not None
    assert len(set(found.rows[:3])) == 1
    placed = planned_step(PARTITIONS, found)
    total = sum(found.rows)
    seconds = computing(placed, told)
    quick, slow = (seconds(r, found.rows[r] * DEVICES / total) for r in (0, 3))
    assert quick == pytest.approx(slow, rel=0.02), "all are done at the same moment"
    hopeless = timed("data", *[(1.0, 1.0)] * 3, (1000.0, 1.0))
    assert rows("data", hopeless) == (64, 64, 64, 1), "nobody is left without rows"


@pytest.mark.parametrize("text", ["single", "tensor", "data; @rows=3,1,1,1", "data; @ranks=0-2"])
def test_nothing_is_shared_where_there_is_nothing_to_share(text: str) -> None:
    assert rows(text, timed("data", *[(0.0, 1.0)] * 3, (0.0, 4.0))) is None


def test_a_plan_is_what_its_layouts_are() -> None:
    told = timed("hybrid:tensor=2", (0.0, 1.0), (0.0, 1.0), (0.0, 4.0), (0.0, 1.0))
    assert rows("data; *=hybrid:tensor=2", told) == (4, 1), "nothing is `data` in it"


def test_a_slow_first_device_is_left_out() -> None:
    paces = [(0.0, 10.0)] + [(0.0, 1.0)] * 3
    told = timed("data", *paces)
    plans = [Plan.parse(text) for text in ("data", "single")]
    network = flat(planned_step(PARTITIONS, plans[0])).network
    single = timed("single", *paces).compute
    told = Profile(4, {**told.compute, **single}, network)
    more = texts(widened(PARTITIONS, [price(PARTITIONS, p, told) for p in plans], told))
    assert more[0] == "data; @rows=3,32,32,32"
    assert {"data; @ranks=1-3", "data; @ranks=1,2", "single; @ranks=1"} <= set(more)


def priced(tensor: float) -> tuple[list[Candidate], Profile]:
    """The plain plans where one device of four takes ten times as long and nothing costs to send;
    tensor: seconds a row under `tensor`, 1 otherwise."""
    network: dict[tuple[str, Pattern], Curve] = {}
    compute: dict[str, Compute] = {}
    plans = [Plan.parse(text) for text in ("data", "tensor", "single")]
    for plan in plans:
        row = tensor if str(plan) == "tensor" else 1.0
        compute |= timed(str(plan), *[(0.0, row)] * 3, (0.0, 10 * row)).compute
        network |= flat(planned_step(PARTITIONS, plan)).network
    told = Profile(DEVICES, compute, network)
    return [price(PARTITIONS, plan, told) for plan in plans], told


def test_what_is_far_behind_is_tried_no_further() -> None:
    for tensor, expected in ((0.4, True), (0.6, False)):
        found, told = priced(tensor)
        seconds = {str(c.plan): c.seconds for c in found}
        assert seconds["data"] > 2 * seconds["single"], "but that is the slow device's doing"
        more = texts(widened(PARTITIONS, found, told))
        assert "data; @rows=32,32,32,3" in more and "data; @ranks=0-2" in more
        assert ("tensor; @ranks=0,1" in more) is expected


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
