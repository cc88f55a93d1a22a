"""A schedule: pictures of each kind, lengths, and what makes a list of actions no schedule."""

import random
from itertools import product

import pytest

from synchromesh.values.schedule import (
    PIPELINES,
    Action,
    Schedule,
    forward_only,
    most_in_flight,
    pipeline,
    taking_turns,
)


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def again(groups: int, times: int) -> tuple[int, ...]:
    """Groups that come again so often, in turns."""
    return tuple(range(groups)) * times


def length(schedule: Schedule, forward: float = 1, backward: float = 1) -> float:
    """Seconds until all has ended."""

    def seconds(action: Action) -> float:
        return forward if action.kind == "F" else backward

    return max(begun + seconds(action) for action, begun in schedule.times(seconds).items())


def parted_length(schedule: Schedule, forward: float, inputs: float, weights: float) -> float:
    """The same, of a schedule that divides backwards."""
    parts = {"F": forward, "B": inputs, "W": weights}
    begun = schedule.times(lambda action: parts[action.kind])
    return max(time + parts[action.kind] for action, time in begun.items())


def test_gpipe() -> None:
    assert pipeline("gpipe", (0, 1, 2), 3).grid() == drawn("""
        F0 F1 F2 .. .. .. .. B0 B1 B2
        .. F0 F1 F2 .. .. B0 B1 B2
        .. .. F0 F1 F2 B0 B1 B2""")
    assert pipeline("gpipe", (0, 1, 0, 1), 2).grid() == drawn("""
        0F0 0F1 2F0 2F1 ... ... 2B0 2B1 0B0 0B1
        ... 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1""")


def test_one_forward_one_backward() -> None:
    assert pipeline("1f1b", (0, 1, 2), 4).grid() == drawn("""
        F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
        .. .. F0 B0 F1 B1 F2 B2 F3 B3""")
    assert pipeline("1f1b", (0,), 3).grid() == "F0 B0 F1 B1 F2 B2", "accumulation"
    assert pipeline("1f1b", (0, 1, 0), 3).grid() == drawn("""
        0F0 0F1 2F0 2B0 2F1 0B0 0F2 2B1 2F2 0B1 2B2 ... 0B2
        ... 1F0 1F1 ... 1B0 ... ... 1F2 1B1 ... ... 1B2""")


def test_interleaved() -> None:
    assert pipeline("interleaved", (0, 1, 0, 1), 4).grid() == drawn("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3""")
    for m in (1, 2, 5):
        assert pipeline("interleaved", (0, 1, 2), m) == pipeline("1f1b", (0, 1, 2), m)


def test_zero_bubble() -> None:
    """The first is ZB-H1 as the paper draws it (figure 3)."""
    assert pipeline("zero-bubble", (0, 1, 2, 3), 8).grid() == drawn("""
        F0 F1 F2 F3 .. .. .. B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
        .. F0 F1 F2 .. .. B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
        .. .. F0 F1 .. B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
        .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7""")
    assert pipeline("zero-bubble", (0, 1), 3).grid() == drawn("""
        F0 F1 .. B0 W0 F2 B1 W1 B2 W2
        .. F0 B0 F1 B1 W0 F2 B2 W1 W2""")
    assert pipeline("zero-bubble-2", (0, 1, 2), 5).grid() == drawn("""
        F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
        .. F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
        .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4""")
    for name in ("zero-bubble", "zero-bubble-2"):
        assert pipeline(name, (0,), 3) == pipeline("1f1b", (0,), 3), "nobody waits"
        assert pipeline(name, (0, 1), 2).divides and not pipeline("1f1b", (0, 1), 2).divides


def test_an_evaluation_runs_forward_only() -> None:
    assert forward_only((0, 1), 3).grid() == "F0 F1 F2\n.. F0 F1 F2"
    assert forward_only((0, 1, 0), 2).grid() == "0F0 0F1 2F0 2F1\n... 1F0 1F1"


def test_micro_batches_that_take_turns_share_a_backward() -> None:
    assert taking_turns(1).grid() == "F0 B0"
    assert taking_turns(3).grid() == "F0 F1 F2 B2 B1 B0"
    assert taking_turns(2, turns=2).grid() == "F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0"


def test_accumulated_micro_batches_follow_one_after_the_other() -> None:
    assert taking_turns(3, at_once=1).grid() == "F0 B0 F1 B1 F2 B2"
    assert taking_turns(3, at_once=2).grid() == "F0 F1 B1 B0 F2 B2"


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_backward_is_the_reverse_of_forward(count: int, turns: int) -> None:
    made = taking_turns(count, turns)
    (actions,) = made.groups
    assert made.micro_batches == count and len(actions) == 2 * count * turns
    forward, backward = actions[: count * turns], actions[count * turns :]
    assert [(a.micro_batch, a.turn) for a in backward] == [
        (a.micro_batch, a.turn) for a in reversed(forward)
    ]


TIMES = ((1, 1), (1, 2), (3, 2))  # of forward and backward


@pytest.mark.parametrize("groups", range(1, 9))
def test_lengths_and_micro_batches_in_flight(groups: int) -> None:
    """p groups, m micro-batches: (m + p - 1)(f + b)."""
    for count in range(1, 17):
        gpipe, one = (pipeline(name, again(groups, 1), count) for name in ("gpipe", "1f1b"))
        for f, b in TIMES:
            assert length(gpipe, f, b) == length(one, f, b) == (count + groups - 1) * (f + b)
        for g in range(groups):
            assert gpipe.in_flight(g) == count
            assert one.in_flight(g) == min(groups - g, count)


@pytest.mark.parametrize("groups", range(2, 9))
def test_zero_bubble_waits_as_the_paper_says(groups: int) -> None:
    """(p - 1) max(f + b - w, f, b), of equal times a third of 1F1B's (p - 1)(f + b + w), and
    (p - 1) max(f + b - 2 w, f, b - f) with more in flight."""
    draw = random.Random(groups)
    for count, number in product(range(1, 20), range(12)):
        f, b, w = parts = [draw.randint(1, 9) for _ in range(3)] if number else [1, 1, 1]
        first, second = (
            parted_length(pipeline(name, again(groups, 1), count), *parts)
            for name in ("zero-bubble", "zero-bubble-2")
        )
        waited, again_waited = (length - count * (f + b + w) for length in (first, second))
        if count >= groups:
            assert waited == (groups - 1) * max(f + b - w, f, b)
            assert number or waited == (groups - 1) * (f + b + w) / 3
        if count >= 2 * groups - 1 and w <= b:
            assert again_waited == (groups - 1) * max(f + b - 2 * w, f, b - f)
        assert (groups - 1) * f <= min(waited, again_waited)
        assert max(waited, again_waited) <= (groups - 1) * (f + b + w), "as 1F1B at most"


@pytest.mark.parametrize("groups", range(1, 9))
def test_zero_bubble_holds_what_1f1b_holds_on_its_first_stage(groups: int) -> None:
    for count in range(1, 20):
        for name, most in (("zero-bubble", groups), ("zero-bubble-2", 2 * groups - 1)):
            made = pipeline(name, again(groups, 1), count)
            assert max(made.in_flight(g) for g in range(groups)) <= min(most, count)


@pytest.mark.parametrize("groups", range(2, 9))
@pytest.mark.parametrize("times", [2, 3])
def test_interleaving_divides_what_is_idle(groups: int, times: int) -> None:
    """m (f + b) + (p - 1)(f + b) / v; each of the v stages of a group takes f / v and b / v."""
    of = again(groups, times)
    for count in range(groups, 17, groups):
        made = pipeline("interleaved", of, count)
        for f, b in TIMES:
            assert length(made, f, b) == (times * count + groups - 1) * (f + b)
        for g in range(groups):
            most = (times - 1) * groups + 2 * (groups - g - 1) + 1  # arXiv 2104.04473's code
            own = range(g, len(of), groups)
            assert most_in_flight(len(of), own, count) == min(most, times * count)
            assert made.in_flight(g) <= most_in_flight(len(of), own, count)


@pytest.mark.parametrize("name", PIPELINES)
def test_any_stages_on_any_groups_are_complete(name: str) -> None:
    """A schedule checks itself."""
    rng = random.Random(name)
    for _ in range(60):
        groups = rng.randint(1, 5)
        of = [*range(groups), *(rng.randrange(groups) for _ in range(rng.randint(0, 8 - groups)))]
        rng.shuffle(of)
        count = rng.randint(1, 16)
        made = pipeline(name, tuple(of), count)
        assert made.of == tuple(of) and made.micro_batches == count
        assert all(made.in_flight(of[s], s) <= count for s in range(len(of)))
        if name == "gpipe":
            for actions in made.groups:
                kinds = "".join(a.kind for a in actions)
                assert kinds == "F" * (len(kinds) // 2) + "B" * (len(kinds) // 2)


def test_actions_have_a_text_form() -> None:
    assert str(Action(2, "F", 0)) == "2F0" and Action.parse("12B7") == Action(12, "B", 7)
    assert str(Action(2, "F", 0, 1)) == "2F0.1" and Action.parse("2F0.1") == Action(2, "F", 0, 1)
    assert str(Action(2, "W", 0)) == "2W0" and Action.parse("2W0") == Action(2, "W", 0)
    for text in ("2X0", "F0", "2F", "2F0 ", "2F0."):
        with pytest.raises(ValueError, match="is no action: write it as 2F0"):
            Action.parse(text)


def test_lists_that_are_no_schedule() -> None:
    def made(*groups: str) -> Schedule:
        return Schedule(tuple(tuple(map(Action.parse, s.split())) for s in groups))

    assert made("0F0 0B0", "1F0 1B0") == pipeline("gpipe", (0, 1), 1)
    with pytest.raises(ValueError, match="stage 1 should run F and B of micro-batches 0 to 0"):
        made("0F0 0B0", "1F0")
    with pytest.raises(ValueError, match=r"stage 1 should run F of .* not nothing"):
        made("0F0", "2F0")
    with pytest.raises(ValueError, match="stage 0 is on groups 0 and 1: it runs on one"):
        made("0F0 1F0 1B0", "0B0")
    with pytest.raises(ValueError, match="each group of a schedule runs at least one action"):
        made("0F0 0B0", "")
    with pytest.raises(ValueError, match="waits for ever at 0B0, 1F1"):
        made("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    turns = tuple(map(Action.parse, ["0F0", "0F0.1", "0B0", "0B0.1"]))
    with pytest.raises(ValueError, match="waits for ever at 0B0"):
        Schedule((turns,), turns=2)
    with pytest.raises(ValueError, match="should run F and B and W of micro-batches 0 to 0"):
        made("0F0 0B0 0W0", "1F0 1B0")
    with pytest.raises(ValueError, match="waits for ever at 0W0"):
        made("0F0 0W0 0B0")
    with pytest.raises(ValueError, match="no schedule '2f2b' is built; there are 1f1b"):
        pipeline("2f2b", (0, 1), 2)
    for of, count in (((0, 2), 1), ((), 1), ((0, 1), 0)):
        with pytest.raises(ValueError, match="at least one micro-batch and stage"):
            pipeline("1f1b", of, count)
