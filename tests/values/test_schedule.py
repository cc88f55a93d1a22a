"""A schedule: pictures of each kind, and what makes a list of actions no schedule."""

import pytest

from synchromesh.values.schedule import (
    Action,
    Schedule,
    gpipe,
    interleaved,
    one_forward_one_backward,
)


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_gpipe() -> None:
    assert gpipe(3, 3).grid() == drawn("""
        F0 F1 F2 .. .. .. .. B0 B1 B2
        .. F0 F1 F2 .. .. B0 B1 B2
        .. .. F0 F1 F2 B0 B1 B2""")


def test_one_forward_one_backward() -> None:
    assert one_forward_one_backward(3, 4).grid() == drawn("""
        F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
        .. .. F0 B0 F1 B1 F2 B2 F3 B3""")


def test_interleaved_micro_batches_take_turns_and_share_a_backward() -> None:
    assert interleaved(1).grid() == "F0 B0"
    assert interleaved(3).grid() == "F0 F1 F2 B2 B1 B0"
    assert interleaved(2, turns=2).grid() == "F0.0 F1.0 F0.1 F1.1 B1.1 B0.1 B1.0 B0.0"


def test_accumulated_micro_batches_follow_one_after_the_other() -> None:
    assert interleaved(3, at_once=1).grid() == "F0 B0 F1 B1 F2 B2"
    assert interleaved(3, at_once=2).grid() == "F0 F1 B1 B0 F2 B2"


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_backward_is_the_reverse_of_forward(count: int, turns: int) -> None:
    made = interleaved(count, turns)
    (actions,) = made.stages
    assert made.micro_batches == count and len(actions) == 2 * count * turns
    forward, backward = actions[: count * turns], actions[count * turns :]
    assert [(a.micro_batch, a.turn) for a in backward] == [
        (a.micro_batch, a.turn) for a in reversed(forward)
    ]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_1f1b_takes_the_time_of_gpipe_and_holds_fewer_activations(stages: int, count: int) -> None:
    a, b = gpipe(stages, count), one_forward_one_backward(stages, count)
    length = 2 * (count + stages - 1)
    assert max(a.times().values()) == max(b.times().values()) == length - 1
    for stage, actions in enumerate(b.stages):
        held = peak = 0
        for action in actions:
            held += 1 if action.kind == "F" else -1
            peak = max(peak, held)
        assert peak == min(stages - stage, count)


def test_actions_have_a_text_form() -> None:
    assert str(Action(2, "F", 0)) == "2F0" and Action.parse("12B7") == Action(12, "B", 7)
    assert str(Action(2, "F", 0, 1)) == "2F0.1" and Action.parse("2F0.1") == Action(2, "F", 0, 1)
    for text in ("2X0", "F0", "2F", "2F0 ", "2F0."):
        with pytest.raises(ValueError, match="is no action: write it as 2F0"):
            Action.parse(text)


def test_lists_that_are_no_schedule() -> None:
    def made(*stages: str) -> Schedule:
        return Schedule(tuple(tuple(map(Action.parse, s.split())) for s in stages))

    assert made("0F0 0B0", "1F0 1B0") == gpipe(2, 1)
    with pytest.raises(ValueError, match="stage 1 should run F and B of micro-batches 0 to 0"):
        made("0F0 0B0", "1F0")
    with pytest.raises(ValueError, match="waits for ever at 0B0, 1F1"):
        made("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    turns = tuple(map(Action.parse, ["0F0", "0F0.1", "0B0", "0B0.1"]))
    with pytest.raises(ValueError, match="waits for ever at 0B0"):
        Schedule((turns,), turns=2)
