"""The monitor: what every step really took on every rank, and whether that has changed.

Each step every rank tells with its rows what the step before cost it, computing and waiting; so
all ranks see the same table and come to the same conclusion at the same step, without a message
of their own. After `SETTLE` steps the medians of the next `BASE` are what is usual; then, over the
last `WINDOW` steps,

    drift   <=>   | median step / usual step - 1 | > max(LEAST, NOISE * mad / usual step)

at `SURE` steps in a row, with mad the median distance of the usual steps from their median. A
median of eight ignores three outliers, and a pause that passes by. What a step takes now is the
median of the last `SURE`. Devices are the reason where they explain most of the difference,

    explained  =  (slowest rank's computing now - usual) / (step now - usual),

else the links are.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SETTLE, BASE, WINDOW, SURE = 3, 16, 8, 4
LEAST = 0.15  # of the usual step: smaller changes are not worth measuring for
NOISE = 6.0
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
    explained: float  # the part of the difference that devices explain
    ranks: tuple[int, ...] = ()  # that take part; none: 0, 1, 2, ...

    @property
    def device_drift(self) -> bool:
        """Whether devices compute at another speed."""
        return self.explained > PART

    @property
    def link_drift(self) -> bool:
        """Whether links carry at another one; both may be."""
        return self.explained < 1.0 - PART

    def __str__(self) -> str:
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
        now = median(_step(row) for row in self._recent)
        usual = self.usual
        bound = max(LEAST * usual.step, NOISE * usual.spread)
        self._off = self._off + 1 if abs(now - usual.step) > bound else 0
        return _drift(usual, list(self._recent)[-SURE:]) if self._off >= SURE else None


def _step(table: Sequence[Told]) -> float:
    """Seconds of a step: of the rank that it took longest."""
    return max(computing + waiting for computing, waiting in table)


def _drift(usual: Usual, tables: Sequence[Sequence[Told]]) -> Drift:
    now = median(_step(row) for row in tables)
    computing = [median(row[r][0] for row in tables) for r in range(len(usual.computing))]
    ratios = tuple(c / max(1e-9, b) for c, b in zip(computing, usual.computing, strict=True))
    difference = now - usual.step
    by_devices = max(computing) - max(usual.computing)
    return Drift(usual.step, now, ratios, by_devices / difference if difference else 0.0)


def _usual(tables: Sequence[Sequence[Told]]) -> Usual:
    steps = [_step(table) for table in tables]
    middle = median(steps)
    computing = tuple(median(row[r][0] for row in tables) for r in range(len(tables[0])))
    return Usual(middle, median(abs(s - middle) for s in steps), computing)
