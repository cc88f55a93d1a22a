"""The headroom of a device: how much is kept, and why."""

import pytest

from synchromesh.planner.problem import Headroom

GB = 1e9


@pytest.mark.parametrize(
    ("memory", "settings", "kept", "why"),
    [
        (80 * GB, {}, 4 * GB, "5% of it"),
        (80 * GB, {"error": 0.02}, 4 * GB, "5% of it"),
        (80 * GB, {"error": 0.25}, 16 * GB, "predictions may be off by 25%"),
        (80 * GB, {"reserve": Headroom.RESERVE}, 4 * GB, "5% of it"),
        (GB, {"reserve": 0.2 * GB}, 0.2 * GB, "what a process holds besides tensors"),
        (GB, {"reserve": 2 * GB}, GB, "what a process holds besides tensors"),
        (GB, {"reserve": 2 * GB, "asked": "12.5%"}, 0.125 * GB, "as asked for"),
        (80 * GB, {"error": 0.25, "asked": "4GiB"}, 4 * 2**30, "as asked for"),
        (80 * GB, {"error": 0.25, "asked": "0%"}, 0.0, "as asked for"),
    ],
)
def test_the_most_of_what_may_be_needed_is_kept(
    memory: float, settings: dict[str, str], kept: float, why: str
) -> None:
    room = Headroom.of(memory, **settings)  # type: ignore[arg-type]
    assert room.kept == pytest.approx(kept) and room.why == why
    assert room.usable == pytest.approx(memory - kept)


def test_a_prediction_that_is_off_by_the_error_fits() -> None:
    assert Headroom.of(80 * GB, error=0.3).usable * 1.3 == pytest.approx(80 * GB)


@pytest.mark.parametrize("asked", ["", "ten", "-5%", "5 %", "100%", "0.1", "5", "1e3%", "٣%"])
def test_what_is_no_headroom(asked: str) -> None:
    with pytest.raises(ValueError, match="no part, as 10%, and no size"):
        Headroom.of(80 * GB, asked)


def test_a_headroom_that_leaves_nothing() -> None:
    with pytest.raises(ValueError, match=r"headroom 80GB leaves nothing of 80\.0 GB"):
        Headroom.of(80 * GB, "80GB")


def test_it_is_a_sentence() -> None:
    assert str(Headroom.of(80 * GB)) == (
        "plans may use 76.0 GB of a device's 80.0 GB: 4.0 GB are headroom (5% of it)"
    )
