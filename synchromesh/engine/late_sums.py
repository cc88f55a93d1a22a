"""Sums of gradients that are taken some steps late (`@synchronisation=stale:k`), so that their
traffic may take as long as whole steps.

    step      0            1            2            3                        k = 1
    sent      g0 ------>   g1 ------>   g2 ------>   g3
    taken     -            g0           g1           g2         and g3 where one model is asked for

All ranks step by the same sums, in the same order. What is left is taken in as many steps more
(`GradientSums.flush`)."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from synchromesh.engine.gradient_buckets import FlatBucket, Summed
from synchromesh.engine.gradients import Ahead, GradientSync


class SumUnderWay(NamedTuple):
    """A bucket's sum of one step, and its memory."""

    work: Any
    flat: Tensor
    views: Sequence[Tensor]
    counts: Tensor


class LateBucket(FlatBucket):
    """A bucket with memory for as many sums as are under way, and for the one that is taken."""

    def __init__(self, items: Sequence[Summed]) -> None:
        super().__init__(items)
        self._under_way: deque[SumUnderWay] = deque()
        self._spare: list[SumUnderWay] = []
        self._taken: SumUnderWay | None = None

    def finish(self) -> None:
        """The sum that has begun goes on; no parameter has a gradient of it."""
        if self.work is None:
            return
        self._under_way.append(SumUnderWay(self.work, self.flat, self.views, self.counts))
        self.work = None
        for item in self.items:
            item.parameter.grad = None
        self._give_back()
        spare = self._spare.pop() if self._spare else None
        if spare is None:
            another = FlatBucket(self.items)
            self.flat, self.views, self.counts = another.flat, another.views, another.counts
        else:
            self.flat, self.views, self.counts = spare.flat, [*spare.views], spare.counts

    def take(self) -> None:
        """Waits for the oldest sum; `grad` of each parameter has it."""
        self._give_back()
        self._taken = oldest = self._under_way.popleft()
        self.group.world.wait(oldest.work)
        counts = oldest.counts.tolist()
        for item, view, count in zip(self.items, oldest.views, counts, strict=True):
            item.parameter.grad = view if count else None

    def _give_back(self) -> None:
        """The memory of the sum by which all have stepped."""
        if self._taken is not None:
            self._spare.append(self._taken)
            self._taken = None


class LateSync(GradientSync):
    """Sums gradients over each parameter's group, and gives them `steps` steps later."""

    def __init__(self, parameters: Sequence[Summed], steps: int, *, late: bool = False) -> None:
        super().__init__(parameters, late=late)
        self._steps = steps
        self._scales: deque[float] = deque()
        self._own: deque[list[Tensor | None]] = deque()  # of parameters that no other rank has

    def _bucket(self, items: Sequence[Summed], total: int) -> LateBucket:
        return LateBucket(items)

    def finish(self, scale: float | None = None, ahead: Ahead | None = None) -> None:
        """After it gradients are the sums of so many steps before; none at first."""
        super().finish()
        self._scales.append(1.0 if scale is None else scale)
        self._own.append([p.grad for p in self._alone])
        for p in self._alone:
            p.grad = None
        if len(self._scales) > self._steps:
            self.take()

    def take(self) -> bool:
        """Gradients become the oldest sums that are under way; whether there were any."""
        if not self._scales:
            return False
        for bucket in self._buckets:
            assert isinstance(bucket, LateBucket)
            bucket.take()
        for p, own in zip(self._alone, self._own.popleft(), strict=True):
            p.grad = own
        self.scale = self._scales.popleft()
        shared = (item.parameter for bucket in self._buckets for item in bucket.items)
        self._scale(p.grad for p in (*shared, *self._alone))
        return True
