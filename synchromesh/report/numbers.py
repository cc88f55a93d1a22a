"""Numbers as a reader wants them: three digits and a unit; `NONE` for what is not known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10, sqrt

from synchromesh.results.groups import Spread

NONE = "–"
MINUS = "−"


@dataclass(frozen=True)
class Unit:
    """What a number is written in, of an axis all numbers; `one`: its seconds or bytes."""

    name: str
    one: float

    def write(self, value: float) -> str:
        return f"{plain(value / self.one)} {self.name}"

    def tick(self, number: float) -> str:
        """A round number of the unit: `0.5 s`, `1,000 ms`."""
        return f"{number:,g} {self.name}".rstrip()


NUMBER = Unit("", 1)
# a unit, and from where on the next one is taken
_TIMES = (
    (Unit("µs", 1e-6), 1e-3), (Unit("ms", 1e-3), 1.0), (Unit("s", 1.0), 120.0),
    (Unit("min", 60.0), 7200.0), (Unit("h", 3600.0), float("inf")),
)  # fmt: skip


def plain(value: float | None, digits: int = 3) -> str:
    """`0.0123`, `12.3`, `12,300`: never with an exponent but for what is very small."""
    if value is None or not isfinite(value):
        return NONE
    if value == 0:
        return "0"
    size = floor(log10(abs(value)))
    if size < -6:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    rounded = round(value, digits - 1 - size)
    places = max(digits - 1 - floor(log10(abs(rounded))), 0)
    return f"{rounded:,.{places}f}".replace("-", MINUS)


def seconds(value: float | None) -> str:
    """`12.3 ms`, `1.23 s`, `12.3 min`, `2.30 h`."""
    if value is None or not isfinite(value):
        return NONE
    return time_unit(abs(value)).write(value) if value else "0 s"


def time_unit(*values: float) -> Unit:
    """For all of them: that of the middle of least and most, in orders of magnitude."""
    known = [value for value in values if value] or [1.0]
    middle = sqrt(min(known)) * sqrt(max(known))
    return next(unit for unit, end in _TIMES if middle < end)


def size(value: float | None) -> str:
    """Bytes: `12.3 MiB`."""
    if value is None:
        return NONE
    unit = size_unit(value)
    return unit.write(value) if unit.one > 1 else f"{value:.0f} B"


def size_unit(value: float) -> Unit:
    units = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))
    return next((unit for unit in units if abs(value) >= unit.one), Unit("B", 1))


def share(value: float | None) -> str:
    """A part of one: `12.3 %`."""
    return NONE if value is None else f"{plain(value * 100)} %"


def dollars(value: float | None) -> str:
    """`$0.0350`."""
    return NONE if value is None else f"${plain(value)}"


def metric(value: float | None) -> str:
    """A metric has four significant digits: differences of half a point count."""
    return plain(value, 4)


def spread(value: Spread | None) -> str:
    """`0.912 ± 0.004`: mean and standard deviation over seeds."""
    if value is None:
        return NONE
    deviation = f" ± {plain(value.deviation, 2)}" if value.count > 1 else ""
    return metric(value.mean) + deviation


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def joined(texts: Iterable[str], between: str = ", ") -> str:
    """Those that are not empty."""
    return between.join(text for text in texts if text)


def devices(number: int) -> str:
    return counted(number, "device")


def counted(number: int, noun: str) -> str:
    """`1 run`, `4 runs`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def short(text: str, most: int) -> str:
    """At most so many characters of a line, the last `…` where some are left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"
