"""Decisions: a switch pays by a margin or does not happen; two near plans never take turns."""

import random

from synchromesh.adapt.decision import LIMITS, Budget, Decision, History, weigh


def test_a_saving_must_exceed_the_move_by_the_margin() -> None:
    assert weigh(1.0, 0.5, 100, 10.0).switch
    short = weigh(1.0, 0.5, 20, 10.0)
    assert not short.switch and "not worth 1.5 times the move" in short.reason
    assert weigh(1.0, 0.5, int(2 * 10 * LIMITS.margin) + 1, 10.0).switch


def test_a_small_gain_is_left_alone_however_long_the_run() -> None:
    verdict = weigh(1.0, 1.0 - LIMITS.gain / 2, 10**9, 0.0)
    assert not verdict.switch and "no plan is 8% quicker" in verdict.reason


def test_no_two_plans_take_turns() -> None:
    """If a is worth leaving for b, b is not worth leaving for a, whatever the times."""
    chance = random.Random(0)
    for _ in range(1000):
        a, b, steps = chance.random() + 0.1, chance.random() + 0.1, chance.randrange(10**6)
        assert not (weigh(a, b, steps, 0.0).switch and weigh(b, a, steps, 0.0).switch)


def test_measuring_has_its_share() -> None:
    run = Budget.SECONDS / LIMITS.measuring_share  # seconds in which it may be done once
    budget = Budget(7.0)
    assert budget.allows(7.0, run) and budget.allows(7.0 + run / 2, run / 2)
    assert not budget.allows(7.0, run / 2)
    budget.spend(Budget.SECONDS)
    assert not budget.allows(7.0, run) and budget.allows(7.0, 2 * run)


def test_the_next_time_is_expected_to_take_longer_than_the_last() -> None:
    budget = Budget(0.0)
    budget.spend(8.0)  # the first one, half of it for programs that the next knows
    wanted = Budget.GROWTH * 4.0
    least = (8.0 + wanted) / LIMITS.measuring_share - wanted
    assert budget.allows(0.0, least + 1) and not budget.allows(0.0, least - 1)
    budget.spend(1.0, again=False)  # a probe says nothing of it
    assert budget.allows(0.0, least + 1 / LIMITS.measuring_share + 1)


def decision(step: int, switched: bool) -> Decision:
    return Decision(step, "links", switched, "", "data", "tensor", 2.0, 1.0, 0.5, 3.0)


def test_what_steps_take_since_a_switch_is_noted_once() -> None:
    history = History()
    history.add(decision(1, switched=False))
    assert history.measured(1.0) is None, "nothing was switched"
    history.add(decision(7, switched=True))
    told = history.measured(0.6)
    assert told == history.decisions[-1] and told is not None
    assert (told.step, told.measured_after) == (7, 0.6)
    assert history.measured(0.7) is None


def test_a_plan_that_is_kept_after_a_switch_does_not_get_its_figure() -> None:
    history = History()
    history.add(decision(7, switched=True))
    history.add(decision(13, switched=False))  # the prediction was wrong, and nothing is better
    told = history.measured(0.6)
    assert told is not None and told.step == 7
    assert [d.measured_after for d in history.decisions] == [0.6, None]


def test_the_log_has_both_plans_by_short_names() -> None:
    values = decision(1, switched=True).to_dict()
    assert (values["from"], values["to"]) == ("data", "tensor") and "plan_from" not in values
