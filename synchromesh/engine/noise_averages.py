"""Averages of what steps say of the gradient noise scale (engine/noise_scale.py), its interval."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Annotated

import torch

from synchromesh.values.fields import Within


@dataclass(frozen=True)
class Measuring:
    """How often is measured, and over how many steps it is averaged; chosen but for `share`."""

    # of a step's time, that what is timed of measuring may take on the slowest rank; what is not
    # (calls of hooks, cold caches) takes about as much again: 0.5 to 0.9 % in all on two CPU ranks
    share: float = 0.005
    most: int = 100  # steps from one that is measured to the next
    latest: int = 5  # measured steps whose median says what one takes
    window: int = 500  # measured steps that count, about
    least: int = 10  # measured steps before an interval is given
    # what follows the noise scale lets so many of the first steps be measured, one after the
    # other, until the ends of a standard error are at most a factor of `apart` from each other
    first: int = 50
    apart: float = 4.0
    deviations: float = 1.96  # of a normal distribution on either side: 95 %


MEASURING = Measuring()


@dataclass(frozen=True)
class NoiseScale:
    """What is known of the noise scale, and why not more (`reason`).

    value, low, high: in rows; of 95 %. None: not known, or (high) as large as it may be.
    squared_gradient, trace: |G|^2 and tr S. steps: that were measured. measured_share: of the
    entries of the parameters that are trained."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    squared_gradient: float | None = None
    trace: float | None = None
    steps: int = 0
    measured_share: float = 0.0
    reason: str = ""

    @property
    def known(self) -> float | None:
        """What decisions are made by: at least so much, where no value is known."""
        if self.steps < MEASURING.least:
            return None
        return self.low if self.value is None else self.value


@dataclass(frozen=True)
class NoiseState:
    """What a checkpoint keeps of averages: entries that are measured by data degree, their share
    of all, and what `NoiseAverages` has."""

    entries: Mapping[str, Annotated[int, Within(0)]]
    share: Annotated[float, Within(0.0, 1.0)]
    steps: Annotated[int, Within(0)]
    weights: Annotated[float, Within(0.0)]
    squares: Annotated[float, Within(0.0)]
    sums: tuple[Annotated[float, Within(-inf)], ...]

    def __post_init__(self) -> None:
        if len(self.sums) != 5 or not all(map(str.isdigit, self.entries)):
            raise ValueError("five sums are kept of the noise scale, and degrees are numbers")


class NoiseAverages:
    """Averages of both moments over steps, and the quotient of these: that of one step divides by
    what may be zero.

    Steps weigh alike until there are `window`; then each new one takes 1 / window of what those
    before weigh. Sums are divided by the sum of weights, so that no average is drawn to zero."""

    def __init__(self, window: int = MEASURING.window) -> None:
        self.steps, self._keep, self._window = 0, 1 - 1 / window, window
        self._weights = self._squares = 0.0
        self._sums = torch.zeros(5, dtype=torch.float64)  # of g, t, g g, g t, t t

    def add(self, squared: float, trace: float) -> None:
        """The estimates of |G|^2 and tr S of one step."""
        keep = self._keep if self.steps >= self._window else 1.0
        self.steps += 1
        self._weights, self._squares = keep * self._weights + 1, keep**2 * self._squares + 1
        products = (squared, trace, squared**2, squared * trace, trace**2)
        self._sums = keep * self._sums + torch.tensor(products, dtype=torch.float64)

    def scale(self, share: float = 1.0) -> NoiseScale:
        """share: of the parameters that was measured."""
        if not self.steps:
            return NoiseScale(measured_share=share, reason="no step has been measured yet")
        g, t, *_ = (self._sums / self._weights).tolist()
        low, high = self.interval(MEASURING.deviations)
        reason = "gradient and noise are not told apart yet: measure more steps or larger batches"
        if self.steps < MEASURING.least:
            reason = f"an interval needs {MEASURING.least} measured steps, and {self.steps} were"
        elif high is not None:
            reason = ""
        value = max(t, 0.0) / g if g > 0 else None
        return NoiseScale(value, low, high, g, t, self.steps, share, reason)

    def interval(self, deviations: float) -> tuple[float | None, float | None]:
        """All phi for which the mean of t - phi g lies within `deviations` standard errors of 0,
        as steps were independent (Fieller 1954); where g is well known it is the delta method's.

        (g^2 - z^2 V_gg) phi^2 - 2 (g t - z^2 V_gt) phi + t^2 - z^2 V_tt  <=  0"""
        if self.steps < MEASURING.least:
            return None, None
        part = self._squares / self._weights**2
        g, t, gg, gt, tt = (self._sums / self._weights).tolist()
        spread = deviations**2 * part / (1 - part)  # of means, unbiased
        a, c = g * g - spread * (gg - g * g), t * t - spread * (tt - t * t)
        half = g * t - spread * (gt - g * t)
        root = sqrt(max(half * half - a * c, 0.0))
        if a > 0 and g > 0:
            return max(0.0, (half - root) / a), max(0.0, (half + root) / a)
        return (max(0.0, (half - root) / a) if c > 0 and a < 0 else 0.0), None
