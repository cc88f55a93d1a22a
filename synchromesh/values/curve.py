"""A curve: seconds (or bytes) over a size, by measured points."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from synchromesh.values import document


@dataclass(frozen=True)
class Curve:
    """Seconds over a size: measured points, straight lines between and beyond them.

    points: (size, seconds), sizes ascending. One point alone is a line through the origin. Bytes
    over rows are such curves too."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [x for x, _ in self.points]
        finite = all(0 <= x < float("inf") for x in sizes)
        if not sizes or not finite or sizes != sorted(set(sizes)):
            raise ValueError(f"a curve needs ascending sizes, not {sizes[:8]}")
        if any(not 0 <= y < float("inf") for _, y in self.points):
            raise ValueError(f"a curve needs finite seconds, not {self.points[:8]}")

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> "Curve":
        """The curve through `points`, made non-decreasing: more takes no less time.

        Of several points of one size the highest counts."""
        found: dict[float, float] = {}
        highest = 0.0
        for x, y in sorted(points):
            highest = max(highest, y)
            found[x] = highest
        return cls(tuple(found.items()))

    def __call__(self, size: float) -> float:
        """Seconds at `size`; beyond the ends the nearest line goes on, never below zero."""
        if len(self.points) == 1:
            ((x, y),) = self.points
            return y * size / x if x else y
        sizes = [x for x, _ in self.points]
        i = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        return max(0.0, y0 + (y1 - y0) * (size - x0) / (x1 - x0))

    @property
    def reach(self) -> float:
        """The largest size that was measured."""
        return self.points[-1][0]

    def joined(self, other: "Curve") -> "Curve":
        """Both curves' points; where both have a size, those of `other`."""
        return Curve.of({**dict(self.points), **dict(other.points)}.items())

    def scaled(self, factor: float) -> "Curve":
        """The curve with `factor` times the seconds."""
        return Curve(tuple((x, y * factor) for x, y in self.points))

    def to_plain(self) -> list[list[float]]:
        """The JSON form: [[size, value], ...]."""
        return [[x, y] for x, y in self.points]

    @classmethod
    def from_plain(cls, value: Any, path: str) -> "Curve":
        """From the JSON form at `path` of a document. ValueError by the place that is wrong."""
        points = []
        for i, point in enumerate(document.sequence(value, path)):
            pair = document.sequence(point, f"{path}[{i}]")
            if len(pair) != 2:
                raise ValueError(f"{path}[{i}]: should be [size, value], not {len(pair)} numbers")
            x, y = pair
            points.append((document.number(x, path, 0), document.number(y, path, 0)))
        with document.at(path):
            return cls(tuple(points))
