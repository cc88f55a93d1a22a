"""The observer: what a trainer notes of its steps for the adapter.

Each rank's cost of a step travels with the rows of the next one, so that all ranks get to know
the same table; costs of steps that say nothing of the plan (short batches, trials) are zero."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import Decision
from synchromesh.values.plan import Plan

NO_COST = (0, 0)


class Observer:
    """Notes of the last steps, on a rank. `cost`: microseconds computing and waiting of one."""

    # when plans are made for another size of batches; chosen
    MOST: ClassVar = 8  # of the last batches that must have the other size ...
    LAST: ClassVar = 12  # ... of so many; both grow with each change

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.cost: tuple[int, ...] = NO_COST
        self._sizes: deque[int] = deque(maxlen=self.LAST)  # of the last global batches

    def collect(self, costs: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> Decision | None:
        """Shows the adapter what the last step cost all `ranks`; its last switch, measured."""
        self.cost = NO_COST
        table = [costs[r] for r in ranks]
        return self.adapter.record(table, ranks) if all(sum(c) > 0 for c in table) else None

    def note(self, seconds: float, waited: float) -> None:
        """Notes what a step took here, and how much of it was waiting for other ranks."""
        waited = min(waited, seconds)
        self.cost = (int((seconds - waited) * 1e6), int(waited * 1e6))

    def resized(self, rows: int, planned: int) -> bool:
        """Whether plans should be made for global batches of `rows` rows, which the last one had,
        instead of `planned`: most of the last ones have had them. Each time more of them must, so
        that sizes that take turns are not followed for ever."""
        sizes = self._sizes
        sizes.append(rows)
        times = (sizes.maxlen or self.LAST) // self.LAST
        if rows == planned or sizes.count(rows) < self.MOST * times:
            return False
        self.adapter.resize(planned, rows)
        self._sizes = deque(maxlen=2 * times * self.LAST)
        return True

    def restart(self, plan: Plan) -> None:
        """Forgets what was noted of a plan that is gone."""
        self.cost = NO_COST
        self.adapter.restart(plan)
