"""The monitor: what every step really took on every rank, and whether that has changed.

With the rows of each step every rank sends what the step before cost it, computing and waiting; so
all ranks see the same table and come to the same conclusion at the same step, without a message
of their own. After `settle` steps the medians of the next `base` are what is usual; then, over the
last `window` steps,

    drift   <=>   | median step / usual step - 1 | > max(least, noise * mad / usual step)

or a rank's computing has changed by more than `device` of it and `least` of the step (a host
that is quick again shortens no step where its rows are few), at `confirm` steps in a row; mad is
the median distance of the usual steps from their median. A median of eight ignores three outliers,
and a pause that passes by. What a step takes now is the median of the last `confirm`. Of the
difference

    explained  =  (slowest rank's computing now - usual) / (step now - usual)

is the devices', the rest the links'; each is measured again where it is more than `part`.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class DriftLimits:
    """When steps count as changed. Chosen, not measured, but for `noise` and `window`: with them
    quiet runs of 3 % and of 10 % noise raise no alarm in 10,000 steps (tests/adapt/test_monitor).
    """

    settle: int = 3  # steps after a switch that are not counted
    base: int = 16  # steps whose medians are what is usual
    window: int = 8  # steps that are compared with it
    confirm: int = 4  # steps in a row at which these must differ
    least: float = 0.15  # of the usual step; smaller changes are not worth measuring for
    noise: float = 6.0  # times the median distance of the usual steps from their median
    device: float = 0.3  # of a rank's usual computing
    part: float = 0.2  # of the difference, that devices or links must explain to be measured again


LIMITS = DriftLimits()
Cost = tuple[float, float]  # seconds computing, seconds waiting


@dataclass(frozen=True)
class Usual:
    """What was usual: seconds of a step and of each rank's computing, the spread of both."""

    step: float
    spread: float
    computing: tuple[float, ...]


@dataclass(frozen=True)
class Drift:
    """A change: seconds of a step before and now, each rank's computing over what was usual."""

    before: float
    now: float
    devices: tuple[float, ...]
    explained: float | None  # the part of the difference that devices explain; None: no matter
    ranks: tuple[int, ...] = ()  # that take part; none: 0, 1, 2, ...
    noticed: str = ""  # what was noticed otherwise than by what steps take

    @property
    def device_drift(self) -> bool:
        """Whether devices compute at another speed."""
        return self.explained is not None and self.explained > LIMITS.part

    @property
    def link_drift(self) -> bool:
        """Whether links carry at another one; both may be."""
        return self.explained is not None and self.explained < 1.0 - LIMITS.part

    def __str__(self) -> str:
        if self.noticed or self.explained is None:
            return self.noticed
        what = f"steps take {self.now * 1e3:.0f} ms, {self.before * 1e3:.0f} ms were usual"
        if self.explained > 0.5:
            _, at, factor = max((abs(d - 1), i, d) for i, d in enumerate(self.devices))
            rank = self.ranks[at] if self.ranks else at
            return f"{what}; rank {rank} computes {factor:.1f} times as long"
        waiting = min(1.0, 1.0 - self.explained)
        return f"{what}; waiting for traffic explains {waiting:.0%} of it"


class Monitor:
    """`record` after every step, the same on all ranks; a Drift where something has changed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Learns anew what is usual, as after a switch."""
        self._steps = 0
        self._learning: list[Sequence[Cost]] = []
        self._recent: deque[Sequence[Cost]] = deque(maxlen=LIMITS.window)
        self._off = 0  # steps in a row at which the recent ones were out of the usual
        self.usual: Usual | None = None

    def record(self, table: Sequence[Cost]) -> Drift | None:
        """table: what the last step cost each rank that takes part."""
        self._steps += 1
        if self._steps <= LIMITS.settle:
            return None
        if self.usual is None:
            self._learning.append(table)
            if len(self._learning) == LIMITS.base:
                self.usual = _usual(self._learning)
            return None
        self._recent.append(table)
        if len(self._recent) < LIMITS.window:
            return None
        changed = self._step_changed(self.usual) or self._device_changed(self.usual)
        self._off = self._off + 1 if changed else 0
        return (
            _drift(self.usual, list(self._recent)[-LIMITS.confirm :])
            if self._off >= LIMITS.confirm
            else None
        )

    def _step_changed(self, usual: Usual) -> bool:
        now = median(_step(row) for row in self._recent)
        return abs(now - usual.step) > max(LIMITS.least * usual.step, LIMITS.noise * usual.spread)

    def _device_changed(self, usual: Usual) -> bool:
        return any(
            abs(now - before)
            > max(LIMITS.device * before, LIMITS.least * usual.step, LIMITS.noise * usual.spread)
            for now, before in zip(_computing(self._recent), usual.computing, strict=True)
        )


def _step(table: Sequence[Cost]) -> float:
    """Seconds of a step: of the rank that it took longest."""
    return max(computing + waiting for computing, waiting in table)


def _drift(usual: Usual, tables: Sequence[Sequence[Cost]]) -> Drift:
    now = median(_step(row) for row in tables)
    computing = _computing(tables)
    ratios = tuple(c / max(1e-9, b) for c, b in zip(computing, usual.computing, strict=True))
    difference = now - usual.step
    by_devices = max(computing) - max(usual.computing)
    if abs(difference) <= LIMITS.least * usual.step:  # steps are what they were: a device is not
        return Drift(usual.step, now, ratios, 1.0)
    return Drift(usual.step, now, ratios, by_devices / difference)


def _usual(tables: Sequence[Sequence[Cost]]) -> Usual:
    steps = [_step(table) for table in tables]
    middle = median(steps)
    spread = median(abs(s - middle) for s in steps)
    return Usual(middle, spread, tuple(_computing(tables)))


def _computing(tables: Collection[Sequence[Cost]]) -> list[float]:
    """The median of each rank's computing."""
    return [median(c for c, _ in column) for column in zip(*tables, strict=True)]
