"""A schedule: pictures of GPipe and 1F1B, and what makes a list of actions no schedule."""

import pytest

from synchromesh.values.schedule import Action, Schedule, gpipe, one_forward_one_backward


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
    for text in ("2X0", "F0", "2F", "2F0 "):
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
