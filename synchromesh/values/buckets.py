"""Gradient buckets: which gradients are summed over ranks in one all-reduce.

    backward makes gradients of   p9 p8 p7 | p6 p5 | p4 p3 p2 p1 | p0      (last parameter first)
    buckets are sent as filled    ---- 0 --> -- 1 -> ------ 2 ---->

Only gradients of one kind (same ranks, data type and device) can share a bucket."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
MIB = 1 << 20


@dataclass(frozen=True)
class BucketSizes:
    """Bytes at which a bucket is full and takes no further gradient.

    Both are those of DDP (`bucket_cap_mb` and its first bucket, Li et al. 2020, arXiv 2006.15704).
    """

    full: int = 25 * MIB
    first: int = MIB  # of the first bucket of a kind: small, so that communication begins early


SIZES = BucketSizes()
# Buckets of which each rank gets a part that are under way at once, and take memory as long.
# Chosen: one is sent while another fills.
UNDER_WAY = 2


def fill(
    parameters: Sequence[T],
    kind: Callable[[T], Hashable],
    size: Callable[[T], int],
) -> list[list[T]]:
    """The buckets in the order in which they are sent, each with its parameters.

    parameters: in the order of the model; backward makes their gradients in the reverse one.
    kind: what the gradients of a bucket have in common. size: bytes of a gradient on one rank."""
    filling: dict[Hashable, list[T]] = {}
    left: dict[Hashable, int] = {}  # bytes until the bucket of a kind is full
    done: list[list[T]] = []
    for parameter in reversed(parameters):
        key = kind(parameter)
        filling.setdefault(key, []).append(parameter)
        left[key] = left.get(key, SIZES.first) - size(parameter)
        if left[key] <= 0:
            done.append(filling.pop(key))
            left[key] = SIZES.full
    return done + list(filling.values())


class SendingOrder(Generic[T]):
    """Buckets that are sent in their order, which is that of every rank; each when it is full."""

    def __init__(self, full: Callable[[T], bool]) -> None:
        self.buckets: list[T] = []
        self._full = full
        self._next = 0

    def ready(self) -> list[T]:
        """Those whose turn it is, which are full."""
        start = self._next
        while self._next < len(self.buckets) and self._full(self.buckets[self._next]):
            self._next += 1
        return self.buckets[start : self._next]

    def rest(self) -> list[T]:
        """Those that have not been sent."""
        start, self._next = self._next, len(self.buckets)
        return self.buckets[start:]

    def restart(self) -> None:
        """None has been sent."""
        self._next = 0
