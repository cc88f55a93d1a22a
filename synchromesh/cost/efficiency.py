"""Statistical efficiency: how many epochs a batch size needs to a target, and what that costs.

    E(B)          =  E_min (1 + B / B_crit)              McCandlish et al. 2018, arXiv 1812.06162
    EFFICIENCY(B) =  (phi + B_0) / (phi + B)             Qiao et al. 2021, "Pollux", OSDI
    GOODPUT(B)    =  THROUGHPUT(B) x EFFICIENCY(B)       samples a second, worth as many at B_0

B is rows of a batch, phi the gradient noise scale in rows; where phi = B_crit, efficiency is
E(B_0) / E(B), but measured ones differ (1.5 to 20 times). The curve of points (B_i, E_i) has

    min sum ((a + s B_i) / E_i - 1)^2,      a = E_min > 0,   s = E_min / B_crit >= 0

which is linear in a and s: there is one minimum; s = 0, no slope, is B_crit = infinity."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import numpy as np

Point = tuple[float, float]  # rows of a batch, epochs to the target
HEADING = "batch,epochs"
FLAT = 1e-9  # of E over all batches: less is rounding and no slope
LEAST = 1e-6  # of the least E: what E_min is where epochs grow in proportion to batches


def efficiency(noise_scale: float, batch: float, base: float) -> float:
    """EFFICIENCY: what a row in a batch is worth, of one in a batch of `base` rows."""
    return 1.0 if noise_scale == inf else (noise_scale + base) / (noise_scale + batch)


def gain(noise_scale: float, batch: float, base: float) -> float:
    """Updates of `base` rows that one of `batch` is worth, from 1 to B / B_0 where it is larger:

    r  =  (tr S / B_0 + |G|^2) / (tr S / B + |G|^2)  =  B / B_0 EFFICIENCY(B),   phi = tr S / |G|^2

    AdaScale's gain (Johnson et al. 2020, arXiv 2007.05105, section 3.1)."""
    return batch / base * efficiency(noise_scale, batch, base)


def goodput(samples_per_second: float, noise_scale: float, batch: float, base: float) -> float:
    """GOODPUT, in samples a second of a batch of `base` rows."""
    return samples_per_second * efficiency(noise_scale, batch, base)


@dataclass(frozen=True)
class EpochCurve:
    """E(B). critical_batch: in rows, infinite where all batches need as many epochs."""

    minimum_epochs: float
    critical_batch: float = inf

    def __post_init__(self) -> None:
        if not (0.0 < self.minimum_epochs < inf and self.critical_batch > 0.0):
            raise ValueError(f"{self}: both are above 0, and epochs are finite")

    def epochs(self, batch: float) -> float:
        return self.minimum_epochs * (1.0 + batch / self.critical_batch)

    def steps(self, batch: float, rows_of_an_epoch: int) -> int:
        """Whole steps of `batch` rows in so many epochs."""
        return ceil(self.epochs(batch) * rows_of_an_epoch / batch)

    @classmethod
    def fit(cls, points: Sequence[Point]) -> "EpochCurve":
        """The one of least squared relative errors, of points of at least two batches."""
        (a, slope), _ = _solved(points, 2)
        a = max(a, LEAST * min(e for _, e in points))
        rises = slope * max(b for b, _ in points) > FLAT * a
        return cls(float(a), float(a / slope) if rises else inf)


def document(of: "EpochCurve | ToTarget") -> dict[str, Any]:
    """The JSON form; its keys are interface. None is for what is infinite."""
    return {k: None if x == inf else x for k, x in asdict(of).items()}


def _solved(points: Sequence[Point], unknowns: int) -> tuple[Any, float]:
    """a, with two unknowns s too, and the sum of squares."""
    from scipy.optimize import nnls

    batch, epochs = np.array(points, dtype=float).T
    columns = np.stack([1.0 / epochs, batch / epochs][:unknowns], axis=1)
    scale = columns.max(axis=0)  # batches may be of any size
    found, norm = nnls(columns / scale, np.ones(len(points)))
    return found / scale, float(norm) ** 2


@dataclass(frozen=True)
class EpochFit:
    """The curve of measured points of three batches or more, and what it errs by."""

    points: tuple[Point, ...]
    most_points: ClassVar[int] = 2_000  # of a file: each is left out once

    def __post_init__(self) -> None:
        if (found := len({b for b, _ in self.points})) < 3:
            told = f"a fit needs at least three different batches, and there are {found}: "
            raise ValueError(f"{told}train with further batch sizes to the target")

    @classmethod
    def load(cls, path: str | Path) -> "EpochFit":
        """Of a CSV file of `batch,epochs`, in any order. ValueError names the line at fault."""
        try:
            heading, *lines = Path(path).read_text("utf-8-sig").splitlines() or [""]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as batches and epochs: {error}") from error
        if heading.replace(" ", "") != HEADING:
            raise ValueError(f"{path}: line 1 should read `{HEADING}`, not {heading[:60]!r}")
        if len(lines) > cls.most_points:
            raise ValueError(f"{path}: {len(lines):,} points are more than {cls.most_points:,}")
        found = [_point(x, f"{path}: line {n}") for n, x in enumerate(lines, 2) if x.strip()]
        try:
            return cls(tuple(found))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @cached_property
    def curve(self) -> EpochCurve:
        return EpochCurve.fit(self.points)

    @property
    def slope_known(self) -> bool:
        """Whether the points tell a slope, and so a critical batch: a t test at 5 %."""
        from scipy.special import stdtrit

        free, (flat, curved) = len(self.points) - 2, (_solved(self.points, n)[1] for n in (1, 2))
        significant = (flat - curved) * free > stdtrit(free, 0.975) ** 2 * curved
        return bool(significant) and self.curve.critical_batch < inf

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface. Errors are relative; a point that is left out is
        predicted by the fit of all others, also those of its batch."""
        told = {**document(self.curve), "slope_known": self.slope_known}
        points, curve = list[dict[str, float]](), self.curve
        for i, (batch, epochs) in enumerate(self.points):
            others = EpochCurve.fit(self.points[:i] + self.points[i + 1 :])
            error, left_out = (abs(c.epochs(batch) / epochs - 1.0) for c in (curve, others))
            points.append({"batch": batch, "epochs": epochs, "fitted": curve.epochs(batch)})
            points[-1] |= {"error": error, "left_out": left_out}
        for name, key in (("", "error"), ("left_out_", "left_out")):
            errors = [point[key] for point in points]
            told |= {f"{name}mean_error": mean(errors), f"{name}largest_error": max(errors)}
        return {**told, "points": points}


def _point(line: str, at: str) -> Point:
    with suppress(ValueError):
        batch, epochs = map(float, line.split(","))
        if 1e-99 < batch < 1e99 and 1e-99 < epochs < 1e99:
            return batch, epochs
    raise ValueError(f"{at} should be `{HEADING}`, two finite numbers above 0, not {line[:60]!r}")


@dataclass(frozen=True)
class ToTarget:
    """What a plan takes until a target is reached; dollars, on demand and on spot: None where no
    price is known."""

    epochs: float
    steps: int
    seconds: float
    dollars: float | None
    dollars_spot: float | None = None


@dataclass(frozen=True)
class Goal:
    """A target, as `accuracy=0.9`, the epochs that batches need to it, and rows of an epoch."""

    target: str
    curve: EpochCurve
    rows: int

    def reached(
        self, batch: int, seconds: float, price: float | None, spot: float | None = None
    ) -> ToTarget:
        """By steps of `batch` rows that take so many useful seconds. price, spot: dollars a
        second."""
        steps = self.curve.steps(batch, self.rows)
        paid = (None if rate is None else steps * seconds * rate for rate in (price, spot))
        return ToTarget(self.curve.epochs(batch), steps, steps * seconds, *paid)
