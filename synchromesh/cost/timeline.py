"""A timeline: one rank's computation and traffic, walked with durations instead of tensors.

    computes      [ c0 ][ c1 ]......[ c2 ]          . waits for what is under way
    under way        ~~~~~~~~~~~~~~~~  ~~~~~~

Durations of computation are those of lasting work, undisturbed; a device does 1 second of such
work a second. Of that, traffic under way takes a part, and computing slows traffic down
(`Overlap`, by kind of collective). Collectives of one group go in the order in which they began,
one after another; the first of n groups share the links evenly, 1/n each. Work begun after a pause
is quicker at first (`BurstSpeed`), traffic without one is late (`Overlap.delay`):

    capacity =  1 - mean of (1 - overlap.compute) over what is under way
    speed    =  burst.speed while there is credit, else capacity
    credit'  =  capacity - speed (capacity alone while waiting), between 0 and burst.credit
    late     =  delay (1 - credit / burst.credit)          before its first byte moves
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from synchromesh.values.device_model import INERT, DeviceModel
from synchromesh.values.profile import Overlap

_NOTHING = 1e-12  # seconds
_UNDISTURBED = Overlap()


@dataclass
class Flight:
    """A collective under way: seconds until it can begin to move, seconds left from then on if
    alone, how it and computation disturb each other, the group that it has to queue for."""

    late: float
    left: float
    overlap: Overlap
    lane: object


@dataclass
class Timeline:
    """`compute`, `depart`, `arrive` in the order in which a rank does them; `clock` is now."""

    overlap: Mapping[str, Overlap] = field(default_factory=dict)
    device: DeviceModel = INERT
    clock: float = 0.0
    computed: float = 0.0  # seconds of computation if nothing disturbed it
    waited: float = 0.0  # seconds in which nothing was computed
    credit: float = 0.0  # seconds of work that go at the burst's speed
    under_way: dict[object, Flight] = field(default_factory=dict)

    @property
    def capacity(self) -> float:
        """Seconds of work that a lasting second holds now."""
        taken = [1.0 - f.overlap.compute for f in self.under_way.values()]
        return 1.0 - sum(taken) / len(taken) if taken else 1.0

    def compute(self, seconds: float) -> None:
        """Computes what takes `seconds` of lasting work, undisturbed."""
        self.computed += seconds
        left = seconds
        while left > _NOTHING:
            capacity = speed = self.capacity
            spans = [self._next(computing=True)] if self.under_way else []
            if self.credit > _NOTHING and self.device.burst.speed > capacity:
                speed = self.device.burst.speed
                spans.append(self.credit / (speed - capacity))
            took = min([left / speed, *spans])
            left -= took * speed
            self._pass(took, capacity - speed, computing=True)

    def depart(self, key: object, kind: str, seconds: float, lane: object = None) -> None:
        """A collective of `kind` that takes `seconds` alone begins. lane: its group; none: one
        that no other has."""
        if seconds > 0.0:
            assert key not in self.under_way, f"{key} is under way"
            overlap = self.overlap.get(kind, _UNDISTURBED)
            rested = self.credit / self.device.burst.credit if self.device.burst.credit else 0.0
            self.under_way[key] = Flight(
                overlap.delay * (1.0 - rested), seconds, overlap, key if lane is None else lane
            )

    def arrive(self, key: object) -> None:
        """Waits for a collective that began."""
        while key in self.under_way:
            took = self._next(computing=False)
            self.waited += took
            self._pass(took, self.capacity, computing=False)

    def finish(self) -> None:
        """Waits for everything that began."""
        for key in list(self.under_way):
            self.arrive(key)

    def _rates(self, computing: bool) -> dict[object, float]:
        """Those that move, and how fast: the first of each lane, as far as it is not late."""
        first: dict[object, object] = {}
        for key, flight in self.under_way.items():  # in the order in which they began
            first.setdefault(flight.lane, key)
        moving = {k: f for k in first.values() if (f := self.under_way[k]).late <= _NOTHING}
        return {
            k: (f.overlap.network if computing else 1.0) / len(moving) for k, f in moving.items()
        }

    def _next(self, computing: bool) -> float:
        """Seconds until one of those under way begins to move or has arrived."""
        rates = self._rates(computing)
        arrivals = [self.under_way[k].left / rate for k, rate in rates.items()]
        return min([*arrivals, *(f.late for f in self.under_way.values() if f.late > _NOTHING)])

    def _pass(self, seconds: float, earned: float, computing: bool) -> None:
        """`seconds` go by, no more than `_next`, in which traffic goes on and credit is earned or
        spent."""
        self.clock += seconds
        self.credit = min(self.device.burst.credit, max(0.0, self.credit + earned * seconds))
        for key, rate in self._rates(computing).items():
            self.under_way[key].left -= seconds * rate
        for flight in self.under_way.values():
            flight.late = max(0.0, flight.late - seconds)
        self.under_way = {k: f for k, f in self.under_way.items() if f.left > _NOTHING}
