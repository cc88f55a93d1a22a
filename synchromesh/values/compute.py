"""What computing takes: curves over sizes, seconds and memory of local programs, shared time.

A CPU quota or several processes on a core do two things that a GPU or a processor of one's own
does not: a host computes quicker at first after a pause (`BurstSpeed`), and more time passes on
the wall than on the processor's clock (`slowdown`). The default device model is inert."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from synchromesh.values import document
from synchromesh.values.fields import Within, of_plain, to_plain


@dataclass(frozen=True)
class Curve:
    """Seconds over a size: straight lines between and beyond measured points (size, seconds), in
    ascending order; one point alone is a line through the origin. Also bytes over rows."""

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
        """Through `points`, made non-decreasing. Of several of one size the highest counts."""
        heights: dict[float, float] = {}
        highest = 0.0
        for x, y in sorted(points):
            highest = max(highest, y)
            heights[x] = highest
        return cls(tuple(heights.items()))

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
        return self.points[-1][0]

    def joined(self, other: "Curve") -> "Curve":
        """Both curves' points; where both have a size, those of `other`."""
        return Curve.of({**dict(self.points), **dict(other.points)}.items())

    def scaled(self, factor: float) -> "Curve":
        return Curve(tuple((x, y * factor) for x, y in self.points))

    def to_plain(self) -> list[list[float]]:
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


Place = Annotated[int, Within(0, 1_000_000)]
NOTHING = Curve(((0.0, 0.0),))  # no bytes, whatever the rows


@dataclass(frozen=True)
class Memory:
    """Bytes of a local program over rows, inputs and parameters not counted.

    kept: what its forward keeps for backward. kept_inputs, kept_outputs: which of the inputs and
    outputs (outputs are part of `kept` then) autograd keeps alive. forward: the most that is alive
    at once of what it makes. backward: the most that is alive at once of what was kept, of what it
    makes and of the gradients of its outputs, a parameter's gradient until it is complete;
    staying: the same where gradients of parameters stay."""

    kept: Curve = NOTHING
    forward: Curve = NOTHING
    backward: Curve = NOTHING
    staying: Curve = NOTHING
    kept_inputs: tuple[Place, ...] = ()
    kept_outputs: tuple[Place, ...] = ()

    @classmethod
    def of(
        cls, rows: Iterable[Sequence[float]], inputs: Sequence[int], outputs: Sequence[int]
    ) -> "Memory":
        """From (rows, kept, forward, backward, staying) at several rows, and what is kept."""
        points = list(rows)
        curves = (Curve.of((point[0], point[i]) for point in points) for i in (1, 2, 3, 4))
        kept, forward, backward, staying = curves
        return cls(kept, forward, backward, staying, tuple(inputs), tuple(outputs))


@dataclass(frozen=True)
class Compute:
    """One local program: seconds over rows, forward and backward, of each rank; its memory.
    spread: the largest distance of a timed block from the median of all, over that median."""

    forward: tuple[Curve, ...]
    backward: tuple[Curve, ...]
    memory: Memory
    spread: Annotated[float, Within(0)] = 0.0

    def __post_init__(self) -> None:
        if not (self.forward and self.backward):
            raise ValueError("forward and backward should have a curve for each rank, not none")

    @property
    def reach(self) -> float:
        return min(curve.reach for curve in self.forward)

    @property
    def fewest(self) -> float:
        return max(curve.points[0][0] for curve in self.forward)

    def on(self, rank: int, rows: float) -> tuple[float, float]:
        """Seconds of forward and backward on a rank; one curve alone stands for all ranks."""
        at = min(rank, len(self.forward) - 1)
        return self.forward[at](rows), self.backward[at](rows)

    def joined(self, other: "Compute") -> "Compute":
        def curves(old: tuple[Curve, ...], new: tuple[Curve, ...]) -> tuple[Curve, ...]:
            return tuple(a.joined(b) for a, b in zip(old, new, strict=True))

        m, n = self.memory, other.memory
        memory = replace(
            n, kept=m.kept.joined(n.kept), forward=m.forward.joined(n.forward),
            backward=m.backward.joined(n.backward), staying=m.staying.joined(n.staying),
        )  # fmt: skip
        return Compute(
            curves(self.forward, other.forward), curves(self.backward, other.backward), memory,
            max(self.spread, other.spread),
        )  # fmt: skip


@dataclass(frozen=True)
class BurstSpeed:
    """What a device does after a pause: it computes `speed` times as fast until it has done
    `credit` seconds of work more than at its lasting speed. A CPU quota gives a host a whole
    period's share at once; processors raise their clock for a while. 1 and 0 where there is no
    such thing. Waiting earns credit back, a second a second."""

    speed: float = 1.0
    credit: float = 0.0

    def __post_init__(self) -> None:
        if not (self.speed >= 1.0 and self.credit >= 0.0):
            raise ValueError(f"a burst is no slowdown: speed {self.speed}, credit {self.credit}")


@dataclass(frozen=True)
class DeviceModel:
    """How processors share time that are not a rank's own: the mean burst of all ranks; of each
    the seconds that pass in a second of the clock that programs are timed with (none: 1)."""

    KEYS: ClassVar[tuple[str, str]] = ("sprint", "pace")  # of the JSON form; users have such files

    burst: BurstSpeed = BurstSpeed()
    slowdowns: tuple[float, ...] = ()

    def slowdown_of(self, rank: int) -> float:
        return self.slowdowns[rank] if self.slowdowns else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"sprint": to_plain(self.burst), "pace": list(self.slowdowns)}

    @classmethod
    def from_dict(cls, item: Mapping[str, Any], name: str) -> "DeviceModel":
        """From the document `name` of a profile. ValueError by the key that is wrong."""
        burst = of_plain(BurstSpeed, item["sprint"], f"{name}: sprint", complete=True)
        slowdowns = enumerate(document.sequence(item["pace"], f"{name}: pace"))
        return cls(burst, tuple(document.number(s, f"{name}: pace[{i}]", 0) for i, s in slowdowns))


INERT = DeviceModel()  # processors of their own
