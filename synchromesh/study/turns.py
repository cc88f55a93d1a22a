"""Turns: who runs when. Contestants of a group, each on processes of its own, wait until it is
their turn; a turn is some steps, and nothing else of the study runs meanwhile.

    start     A B C         one after the other: each prepares, measures and plans alone
    warm-up   A B C
    timed     A B C  C B A  A B C ...        so that what changes with time meets all alike
    memory    A B C
    recorded  A B C

The first step of a timed turn is not timed: it finds caches and memory as another has left them.
Processes on CPUs are suspended between their turns (study/channel.py).
With epochs instead of steps, timed turns go on until the last contestant has ended."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")
Mode = Literal["warm-up", "timed", "memory", "recorded"]


@dataclass(frozen=True)
class TurnTuning:
    """How long turns are; all chosen.

    warm_up         steps of a turn of warm-up
    warm_up_turns   at most, of a contestant that tries what is quicker until it has decided
                    (engine/pieces.py, adapt/trials.py: in its first 44 steps)
    rounds          of timed turns, at most
    shortest        steps that are timed in one of them, at least
    least           steps that are timed in all, at least
    recorded        steps
    turn_seconds    of a turn by epochs: short against what changes, long against a pause"""

    warm_up: int = 3
    warm_up_turns: int = 20
    rounds: int = 5
    shortest: int = 3
    least: int = 5
    recorded: int = 2
    turn_seconds: float = 5.0


TUNING = TurnTuning()


@dataclass(frozen=True)
class Turn:
    """Steps of one contestant. mode: what they are for."""

    mode: Mode
    steps: int


class SoFar(Protocol):
    """What is known of a contestant between two of its turns."""

    def settled(self) -> bool:
        """Whether it tries no more what is quicker."""

    def step_seconds(self) -> float | None:
        """Of a step in its last turn; None before the first one."""


def warm_up(of: SoFar) -> Iterator[Turn]:
    for _ in range(TUNING.warm_up_turns):
        yield Turn("warm-up", TUNING.warm_up)
        if of.settled():
            return


def timed(steps: int) -> list[Turn]:
    """Turns in which so many steps are timed, in a few rounds."""
    rounds = min(TUNING.rounds, ceil(steps / TUNING.shortest))
    each = [steps // rounds + (i < steps % rounds) for i in range(rounds)]
    return [Turn("timed", 1 + n) for n in each]


def observed() -> list[Turn]:
    """What is not timed, since watching slows it down. A profiler's start takes the ranks apart,
    and the step after it brings them together."""
    return [Turn("memory", 1), Turn("recorded", 1 + TUNING.recorded)]


def timed_steps(steps: int, at_most: float | None, step_seconds: float | None) -> int:
    """How many steps are timed: `steps`, or what `at_most` seconds hold, but `TUNING.least`."""
    if at_most is None or not step_seconds:
        return steps
    return min(steps, max(TUNING.least, int(at_most / step_seconds)))


def by_steps(of: SoFar, steps: int, at_most: float | None) -> Iterator[Turn]:
    """After warm-up, in a study of so many timed steps, or of `at_most` seconds."""
    yield from timed(timed_steps(steps, at_most, of.step_seconds()))
    yield from observed()


def by_epochs(of: SoFar) -> Iterator[Turn]:
    """After warm-up, of one that ends by itself: timed turns of `TUNING.turn_seconds`."""
    yield from observed()
    while True:
        yield Turn("timed", steps_in(TUNING.turn_seconds, of.step_seconds() or 0.0))


def there_and_back(contestants: Sequence[T], rounds: int) -> list[T]:
    """Their order in a round, of which so many have been."""
    return list(reversed(contestants) if rounds % 2 else contestants)


def count(turns: Iterable[Turn]) -> int:
    return sum(turn.steps for turn in turns)


def steps_in(seconds: float, step_seconds: float) -> int:
    """How many steps fit into so many seconds, at least two: one of them is not timed."""
    return max(2, ceil(seconds / step_seconds)) if step_seconds > 0 else 2
