"""Speeds of devices from a run's log."""

from typing import Any

import pytest

from synchromesh.runs.speeds import measured_speeds


def layout(plan: str) -> dict[str, Any]:
    return {"event": "layout", "time": 0.0, "step": 0, "plan": plan, "components": []}


def recording(*computed: tuple[float, float]) -> dict[str, Any]:
    """Of ranks that computed so large a part of so many seconds."""
    shares = [{"computation": part, "seconds": seconds} for part, seconds in computed]
    return {"event": "recording", "time": 1.0, "steps": [20, 20], "shares": shares}


def test_the_quickest_has_1_and_the_last_recording_holds() -> None:
    lines = [layout("data"), recording((1.0, 1.0), (1.0, 1.0)), recording((0.4, 2.0), (0.8, 2.0))]
    assert measured_speeds(lines, "log") == {0: 1.0, 1: 0.5}


def test_a_rank_that_computes_nothing_has_no_speed() -> None:
    lines = [layout("data; @ranks=0,1"), recording((0.5, 1.0), (0.4, 1.0), (0.0, 1.0))]
    assert measured_speeds(lines, "log") == pytest.approx({0: 0.8, 1: 1.0})


@pytest.mark.parametrize("plan", ["pipeline:stages=2,microbatches=4", "data; @rows=3,1"])
def test_ranks_with_different_work_tell_no_speeds(plan: str) -> None:
    with pytest.raises(ValueError, match=r"log, line 2: under .* compute different things"):
        measured_speeds([layout(plan), recording((1.0, 1.0), (0.5, 1.0))], "log")


def test_only_the_last_recording_and_its_plan_are_asked() -> None:
    before = [layout("data; @rows=3,1"), recording((1.0, 1.0), (0.4, 1.0))]
    lines = [*before, layout("data"), recording((0.5, 1.0), (1.0, 1.0))]
    assert measured_speeds(lines, "log") == {0: 1.0, 1: 0.5}
    with pytest.raises(ValueError, match="log, line 2: unknown layout"):
        measured_speeds([layout("nonsense"), recording((1.0, 1.0))], "log")


def test_without_a_recorded_step_there_is_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"log: no step was recorded.*--trace-steps"):
        measured_speeds([layout("data")], "log")
    with pytest.raises(ValueError, match=r"log, line 1: shares\[1\]\.seconds"):
        measured_speeds([recording((1.0, 1.0), (1.0, -1.0))], "log")
