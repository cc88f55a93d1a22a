"""The meter: what a rank says of its turns, by a channel that keeps it."""

from typing import Any

import pytest

from synchromesh.runs.events import MemoryPeak, RunEvent
from synchromesh.study.meter import Meter
from synchromesh.study.turns import Turn
from synchromesh.values.memory_by_kind import MemoryByKind


class Kept:
    """A channel that grants these turns and keeps what is said."""

    def __init__(self, *turns: Turn) -> None:
        self.turns, self.said = [*turns], list[RunEvent]()

    def turn(self) -> Turn | None:
        return self.turns.pop(0) if self.turns else None

    def say(self, event: RunEvent) -> None:
        self.said.append(event)


class Seen:
    """A watch that keeps which steps had all rows."""

    def __init__(self) -> None:
        self.full: list[bool] = []

    def begin(self) -> None:
        self.full.clear()

    def after_step(self, left: int, full: bool) -> None:
        self.full.append(full)

    def end(self) -> RunEvent:
        return MemoryPeak(peak=MemoryByKind(), more={"full": [*self.full]})


@pytest.mark.parametrize(
    ("rows", "full"),
    [
        ([8, 8], [True]),
        ([3, 8, 8], [False, True]),
        ([3, 3, 3, 8], [False, False, True]),  # of data whose batches are never full
    ],
)
def test_a_watched_turn_lasts_until_a_batch_is_full(rows: list[int], full: list[bool]) -> None:
    channel: Any = Kept(Turn("memory", 1), Turn("timed", 1))
    meter = Meter(channel, 8)
    meter.watches = {"memory": Seen()}
    meter.begin()
    for count in [*rows, 8]:  # the last one runs on after the study has ended
        meter.step(0.5, 0.25, count)
    seen, watched, timed = channel.said
    assert seen.more == {"full": full} and watched.rows == tuple(rows[: len(full)])
    assert (timed.mode, timed.first) == ("timed", len(full) + 1) and meter.over
