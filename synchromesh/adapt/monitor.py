"""The monitor: what every step really took on every rank, and whether that has changed.

Each step every rank tells with its rows what the step before cost it, computing and waiting; so
all ranks see the same table and come to the same conclusion at the same step, without a message
of their own. After `SETTLE` steps the medians of the next `BASE` are what is usual; then, over the
last `WINDOW` steps,

    drift   <=>   | median step / usual step - 1 | > max(LEAST, NOISE * mad / usual step)

with mad the median distance of the usual steps from their median. A median of eight ignores three
outliers, and a pause that passes by.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SETTLE, BASE, WINDOW = 3, 16, 8
LEAST = 0.15  # of the usual step: smaller changes are not worth measuring for
NOISE = 6.0

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

    @property
    def device_drift(self) -> bool:
        """Whether some device computes at another speed, compared with the others."""
        usual = median(self.devices)
        return any(abs(d / usual - 1) > LEAST for d in self.devices)

    def __str__(self) -> str:
        what = f"steps take {self.now * 1e3:.0f} ms, {self.before * 1e3:.0f} ms were usual"
        odd = [(abs(d - 1), r, d) for r, d in enumerate(self.devices) if abs(d - 1) > LEAST]
        if self.device_drift and odd:
            _, rank, factor = max(odd)
            return f"{what}; rank {rank} computes {factor:.1f} times as long"
        return f"{what}; the devices compute as before, so the links have changed"


class Monitor:
    """`tell` after every step, the same on all ranks; a Drift where something has changed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Learns anew what is usual, as after a switch."""
        self._steps = 0
        self._learning: list[Sequence[Told]] = []
        self._recent: deque[Sequence[Told]] = deque(maxlen=WINDOW)
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
        if abs(now - usual.step) <= bound:
            return None
        ratios = tuple(
            median(row[r][0] for row in self._recent) / max(1e-9, before)
            for r, before in enumerate(usual.computing)
        )
        return Drift(usual.step, now, ratios)


def _step(table: Sequence[Told]) -> float:
    """Seconds of a step: of the rank that it took longest."""
    return max(computing + waiting for computing, waiting in table)


def _usual(tables: Sequence[Sequence[Told]]) -> Usual:
    steps = [_step(table) for table in tables]
    middle = median(steps)
    computing = tuple(median(row[r][0] for row in tables) for r in range(len(tables[0])))
    return Usual(middle, median(abs(s - middle) for s in steps), computing)
