"""Where a step's seconds go: parts that add up to what was measured."""

from dataclasses import replace

import pytest

from synchromesh.results.breakdown import overhead, step_parts
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import CommunicationShares, Quartiles, RunResult


def group(devices: int, step: float, **shares: object) -> RunGroup:
    plain = RunResult(
        "t", "data", devices, 64, 0, "done", step_seconds=Quartiles(step, step, step)
    )
    return RunGroup((replace(plain, **shares),))  # type: ignore[arg-type]


FOUR = group(
    4,
    0.5,
    communication_share=CommunicationShares(0.4, 0.2),
    computation_share=0.5,
    waiting_share=0.1,
)


def test_the_parts_are_the_step() -> None:
    parts = step_parts(FOUR)
    assert parts is not None
    assert (parts.computation, parts.hidden) == (0.25, 0.1)
    assert (parts.transfer, parts.waiting) == pytest.approx((0.15, 0.05))
    assert parts.computation + parts.transfer + parts.waiting + parts.other == pytest.approx(0.5)


def test_what_is_beyond_t1_over_n_is_transfer_waiting_and_other() -> None:
    found = overhead(FOUR, group(1, 0.8), weak=False)
    assert found is not None and found.ideal == 0.2
    assert found.total == pytest.approx(found.transfer + found.waiting + found.other)
    assert found.other == pytest.approx(0.1)
    weak = overhead(FOUR, group(1, 0.4), weak=True)  # one device did a quarter of the rows
    assert weak is not None and weak.ideal == 0.4 and weak.other == pytest.approx(-0.1)


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert step_parts(group(4, 0.5)) is None
    assert overhead(FOUR, None, weak=False) is None
