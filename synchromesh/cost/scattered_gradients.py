"""The memory of gradients of which each rank gets a part, on their way through buckets."""

from collections import Counter

from synchromesh.cost.alive_bytes import AliveBytes
from synchromesh.cost.gradients import gradient_buckets
from synchromesh.cost.planned_step import PlannedStep, sharded_bytes
from synchromesh.values.buckets import UNDER_WAY
from synchromesh.values.holding import Holding

SCATTERED, PART = "scattered", "part"


class ScatteredGradients:
    """Buckets of a device group, in which each gradient is added once it is there."""

    def __init__(self, planned: PlannedStep, group: int, alive: AliveBytes) -> None:
        self.alive = alive
        self.buckets = [b for b in gradient_buckets(planned, group) if b[0].parts > 1]
        self.number = {h.tensor.name: n for n, b in enumerate(self.buckets) for h in b}
        self.filled: Counter[int] = Counter()
        self.under_way: list[int] = []

    def open(self, holding: Holding) -> None:
        """The bucket of a gradient is there."""
        number = self.number[holding.tensor.name]
        if number in self.under_way:
            self._arrive(number)
        if not self.filled[number]:
            self.alive.set((SCATTERED, number), sharded_bytes(self.buckets[number]))

    def add(self, holding: Holding) -> None:
        """A gradient goes into its bucket, which is sent when it is full."""
        self.open(holding)
        number = self.number[holding.tensor.name]
        self.filled[number] += 1
        if self.filled[number] == len(self.buckets[number]):
            self._send(number)

    def end_backward(self) -> None:
        """What is summed in each backward is sent."""
        for number, count in list(self.filled.items()):
            if count and self.buckets[number][0].each_backward:
                self._send(number)

    def _send(self, number: int) -> None:
        self.filled[number] = 0
        size = sharded_bytes(self.buckets[number])
        self.alive.set((SCATTERED, number), 2 * size)  # what is sent, and parts of all ranks
        self.alive.meanwhile(0.0)
        self.under_way.append(number)
        if len(self.under_way) > UNDER_WAY:
            self._arrive(self.under_way[0])

    def _arrive(self, number: int) -> None:
        self.under_way.remove(number)
        self.alive.free((SCATTERED, number))
        size = sum(h.kept_bytes for h in self.buckets[number])
        self.alive.set((PART, number), float(size))
