"""A planning session by facts that are made up: one way to ask, whatever has them."""

import pytest

from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planning.session import PlanningSession, quickest
from synchromesh.values.plan import Plan
from tests.models import traced
from tests.planner.decision.test_decide import DEVICES, ROWS, Flat


@pytest.fixture
def session() -> PlanningSession:
    return PlanningSession(Flat(PartitionCache(PlanningProblem(traced("odd_mlp"), ROWS, DEVICES))))


def test_what_is_chosen_is_what_it_is_predicted_to_take(session: PlanningSession) -> None:
    choice = session.choose(session.survey())
    assert choice.chosen.fits and session.refusal(choice) == ""
    again, _ = session.predict(choice.chosen.plan, choice.profile)
    assert (again.seconds, again.memory) == (choice.chosen.seconds, choice.chosen.memory)


def test_a_plan_that_leaves_its_cuts_open_is_cut_before_it_is_priced(
    session: PlanningSession,
) -> None:
    known = session.survey()
    plan = Plan.parse("pipeline:stages=2")
    cut = session.cut(plan, known)
    assert len(cut.stages) == 2 and not cut.open_cuts
    candidate, _ = session.priced(plan, known)
    assert candidate.plan == cut


def test_a_plan_that_cannot_run_has_the_reason(session: PlanningSession) -> None:
    known = session.survey()
    for text, reason in (("pipeline:stages=9", "9"), ("data; nowhere=tensor", "nowhere")):
        candidate, after = session.priced(Plan.parse(text), known)
        assert candidate.time is None and not candidate.fits and reason in candidate.reason
        assert after is known


def test_the_quickest_fits_where_any_does(session: PlanningSession) -> None:
    known = session.survey()
    texts = ("single", "data", "data; nowhere=tensor")
    candidates = [session.priced(Plan.parse(text), known)[0] for text in texts]
    assert str(quickest(candidates).plan) == "data", "half the rows take half as long"
    assert quickest(candidates[2:]) is candidates[2]
