"""A row of the README's table: what it says, its run, how its figures are read and written."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.claims.run import Run


class NoFigure(ValueError):
    """A document does not show what the row is about, in one sentence: it has failed."""


@dataclass(frozen=True)
class Value:
    """One figure of a row.

    least   its goal is the least it should be, else the most
    spread  the least and the most of the rounds or cases behind it; None where there are none
    """

    value: float
    goal: float
    least: bool
    spread: tuple[float, float] | None = None

    @property
    def reached(self) -> bool:
        return self.value >= self.goal if self.least else self.value <= self.goal


def at_least(value: float, goal: float, each: Iterable[float] = ()) -> Value:
    """A figure that should reach its goal; each: of which rounds or cases."""
    return _value(value, goal, True, tuple(each))


def at_most(value: float, goal: float, each: Iterable[float] = ()) -> Value:
    """A figure that should not exceed its goal; each: of which rounds or cases."""
    return _value(value, goal, False, tuple(each))


def _value(value: float, goal: float, least: bool, each: tuple[float, ...]) -> Value:
    if not all(map(math.isfinite, (value, goal, *each))):
        raise NoFigure(f"a figure is not a number: {value}")
    return Value(value, goal, least, (min(each), max(each)) if each else None)


@dataclass(frozen=True)
class Reading:
    """What a document says of a row.

    words   what stands in the row's text besides its figures
    points  cases that the README's picture draws
    """

    values: tuple[Value, ...]
    words: Mapping[str, str | float] = field(default_factory=dict)
    points: Any = None


@dataclass(frozen=True)
class Form:
    """How the figures of a row are written: format of a figure, of its goal and of the rounds or
    cases behind it, unit, units in 1.

    counted: as `3 of 4`, where the goal is all of them.
    """

    value: str
    goal: str = "g"
    unit: str = ""
    times: float = 1.0
    counted: bool = False

    def figure(self, value: Value) -> str:
        if self.counted:
            return f"{value.value:.0f} of {value.goal:.0f}"
        return self._written(value.value, self.value)

    def aim(self, value: Value) -> str:
        return "all" if self.counted else self._written(value.goal, self.goal)

    def range(self, value: Value) -> str:
        """The least and the most, where there are several rounds or cases."""
        if value.spread is None:
            return ""
        low, high = (f"{end * self.times:{self.goal}}" for end in value.spread)
        return f"{low} to {high}{self.unit}"

    def _written(self, number: float, form: str) -> str:
        return f"{number * self.times:{form}}".replace("e-0", "e-") + self.unit


@dataclass(frozen=True)
class Claim:
    """One row.

    name   in the table and for `--only`
    what   its text, with `{words}` of what was read
    run    what measures it; several rows may have one run
    read   from the run's document to the figures
    rooms  folders of the package that its figures depend on; the files of its benchmark are known
           by what that imports
    """

    name: str
    what: str
    run: Run
    read: Callable[[Any], Reading]
    form: Form
    rooms: tuple[str, ...]
