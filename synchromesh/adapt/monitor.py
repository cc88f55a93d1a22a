"""The monitor: what every step really took on every rank, and whether that has changed.

Each step every rank tells with its rows what the step before cost it, computing and waiting; so
all ranks see the same table and come to the same conclusion at the same step, without a message
of their own. After `SETTLE` steps the medians of the next `BASE` are what is usual; then, over the
last `WINDOW` steps,

    drift   <=>   | median step / usual step - 1 | > max(LEAST, NOISE * mad / usual step)

or a rank's computing has changed by more than `DEVICE` of it and `LEAST` of the step (a host
that is quick again shortens no step where its rows are few), at `SURE` steps in a row; mad is the
median distance of the usual steps from their median. A median of eight ignores three outliers, and
a pause that passes by. What a step takes now is the median of the last `SURE`. Of the difference

    explained  =  (slowest rank's computing now - usual) / (step now - usual)

is the devices', the rest the links'; each is looked at where it is more than `PART`.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

SETTLE, BASE, WINDOW, SURE = 3, 16, 8, 4
LEAST = 0.15  # of the usual step: smaller changes are not worth measuring for
NOISE = 6.0
DEVICE = 0.3  # of a rank's usual computing
PART = 0.2  # of the difference, that devices or links must explain to be looked at

Told = tuple[float, float]  # seconds computing, seconds waiting


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
    told: str = ""  # what was noticed otherwise than by what steps take

    @property
    def device_drift(self) -> bool:
        """Whether devices compute at another speed."""
        return self.explained is not None and self.explained > PART

    @property
    def link_drift(self) -> bool:
        """Whether links carry at another one; both may be."""
        return self.explained is not None and self.explained < 1.0 - PART

    def __str__(self) -> str:
        if self.told or self.explained is None:
            return self.told
        what = f"steps take {self.now * 1e3:.0f} ms, {self.before * 1e3:.0f} ms were usual"
        if self.explained > 0.5:
            _, at, factor = max((abs(d - 1), i, d) for i, d in enumerate(self.devices))
            rank = self.ranks[at] if self.ranks else at
            return f"{what}; rank {rank} computes {factor:.1f} times as long"
        waiting = min(1.0, 1.0 - self.explained)
        return f"{what}; waiting for traffic explains {waiting:.0%} of it"


class Monitor:
    """`tell` after every step, the same on all ranks; a Drift where something has changed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Learns anew what is usual, as after a switch."""
        self._steps = 0
        self._learning: list[Sequence[Told]] = []
        self._recent: deque[Sequence[Told]] = deque(maxlen=WINDOW)
        self._off = 0  # steps in a row at which the recent ones were out of the usual
        self.usual: Usual | None = None

    def tell(self, table: Sequence[Told]) -> Drift | None:
        """table: what the last step cost each rank that takes part."""
        self._steps += 1
        if self._steps <= SETTLE:
            return None
        if self.usual is None:
            self._learning.append(table)
            if len(self._learning) == BASE:
                self.usual = _usual(self._learning)
            return None
        self._recent.append(table)
        if len(self._recent) < WINDOW:
            return None
        changed = self._step_changed(self.usual) or self._device_changed(self.usual)
        self._off = self._off + 1 if changed else 0
        return _drift(self.usual, list(self._recent)[-SURE:]) if self._off >= SURE else None

    def _step_changed(self, usual: Usual) -> bool:
        now = median(_step(row) for row in self._recent)
        return abs(now - usual.step) > max(LEAST * usual.step, NOISE * usual.spread)

    def _device_changed(self, usual: Usual) -> bool:
        return any(
            abs(now - before) > max(DEVICE * before, LEAST * usual.step, NOISE * usual.spread)
            for now, before in zip(_computing(self._recent), usual.computing, strict=True)
        )


def _step(table: Sequence[Told]) -> float:
    """Seconds of a step: of the rank that it took longest."""
    return max(computing + waiting for computing, waiting in table)


def _drift(usual: Usual, tables: Sequence[Sequence[Told]]) -> Drift:
    now = median(_step(row) for row in tables)
    computing = _computing(tables)
    ratios = tuple(c / max(1e-9, b) for c, b in zip(computing, usual.computing, strict=True))
    difference = now - usual.step
    by_devices = max(computing) - max(usual.computing)
    if abs(difference) <= LEAST * usual.step:  # steps are what they were: a device is not
        return Drift(usual.step, now, ratios, 1.0)
    return Drift(usual.step, now, ratios, by_devices / difference)


def _usual(tables: Sequence[Sequence[Told]]) -> Usual:
    steps = [_step(table) for table in tables]
    middle = median(steps)
    spread = median(abs(s - middle) for s in steps)
    return Usual(middle, spread, tuple(_computing(tables)))


def _computing(tables: Collection[Sequence[Told]]) -> list[float]:
    """The median of each rank's computing."""
    return [median(c for c, _ in column) for column in zip(*tables, strict=True)]
