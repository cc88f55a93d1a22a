"""Numbers as a reader wants them: three digits and a unit; `NONE` for what is not known."""

from collections.abc import Iterable, Sequence
from math import floor, isfinite, log10

from synchromesh.results.groups import Spread

NONE = "–"
MINUS = "−"


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


def count(value: float | None) -> str:
    """A whole number, with all its digits."""
    return NONE if value is None else f"{value:,.0f}".replace("-", MINUS)


def seconds(value: float | None) -> str:
    """`12.3 ms`, `1.23 s`, `12.3 min`, `2.30 h`."""
    if value is None or not isfinite(value):
        return NONE
    for unit, factor, most in (("µs", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 120.0)):
        if abs(value) < most and value:
            return f"{plain(value / factor)} {unit}"
    if not value:
        return "0 s"
    return f"{plain(value / 60)} min" if abs(value) < 7200 else f"{plain(value / 3600)} h"


def size(value: float | None) -> str:
    """Bytes: `12.3 MiB`."""
    if value is None:
        return NONE
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{plain(value / factor)} {unit}"
    return f"{value:.0f} B"


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
