"""Turns: who runs when. Contestants of a group, each on processes of its own, wait until it is
their turn; a turn is some steps, and nothing else of the study runs meanwhile.

    start     A B C         one after the other: each prepares, measures and plans alone
    warm-up   A B C
    timed     A B C  C B A  A B C ...        so that what changes with time meets all alike
    memory    A B C
    recorded  A B C

The first step of a timed turn is not timed: it finds caches and memory as another has left them.
With epochs instead of steps, timed turns go on until the last contestant has ended.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

Mode = Literal["warm-up", "timed", "memory", "recorded"]

# Of a study by steps; chosen: 13 are what `fit` leaves out too, of which twelve may be trials.
WARM_UP, ROUNDS, RECORDED = 13, 5, 2
# Seconds of a turn by epochs; chosen: short against what changes with time, long against a pause.
TURN_SECONDS = 5.0


@dataclass(frozen=True)
class Turn:
    """Steps of one contestant. mode: what they are for."""

    mode: Mode
    steps: int


def preliminary() -> list[Turn]:
    """Before steps are timed."""
    return [Turn("warm-up", WARM_UP)]


def timed(steps: int) -> list[Turn]:
    """Turns in which so many steps are timed, in at most `ROUNDS` rounds."""
    rounds = min(ROUNDS, steps)
    each = [steps // rounds + (i < steps % rounds) for i in range(rounds)]
    return [Turn("timed", 1 + n) for n in each]


def observed() -> list[Turn]:
    """What is not timed, since watching slows it down. A profiler's start takes the ranks apart,
    and the step after it brings them together."""
    return [Turn("memory", 1), Turn("recorded", 1 + RECORDED)]


def by_steps(steps: int) -> list[Turn]:
    """All turns of a contestant in a study of so many timed steps."""
    return [*preliminary(), *timed(steps), *observed()]


def by_epochs() -> Iterator[Turn | None]:
    """Turns of a contestant that ends by itself; None: of as many steps as `TURN_SECONDS` hold."""
    yield from [*preliminary(), *observed()]
    while True:
        yield None


def steps_in(seconds: float, step_seconds: float) -> int:
    """How many steps fit into so many seconds, at least two: one of them is not timed."""
    return max(2, ceil(seconds / step_seconds)) if step_seconds > 0 else 2
