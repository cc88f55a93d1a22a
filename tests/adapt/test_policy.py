"""The policy: a switch pays by a margin or does not happen; two near plans never take turns."""

import random

from synchromesh.adapt.policy import LIMITS, may_measure, weigh


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
    assert may_measure(0.0, 100 / LIMITS.measuring_share, 3.0)
    assert not may_measure(0.0, 10.0, 3.0) and not may_measure(3.0, 100.0, 1.0)
