"""Where a tensor's value and gradient are on the tensor axis, and the boxes of each rank.

    R           value replicated, gradient replicated
    r           value replicated, gradient partial (the sum over the ranks is the gradient)
    P           value partial (the sum over the ranks is the value), gradient replicated
    S(d)        value and gradient sharded along dimension d
    S(d, n)     the same within each of n equal segments of dimension d (a fused q-k-v weight: 3)
    S(d, n, u)  the same, u neighbouring entries staying together (a head of attention)

Parts are equal where the ranks divide the units of a segment. Else they differ by one unit: the
first ranks have one more, and where there are fewer units than ranks the last ranks have none.
A placement whose units the ranks divide is written without them, as its parts are those of u = 1.

`R -> r` is Megatron's f (identity; all-reduce in backward), `P -> R` its g (arXiv 1909.08053)."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from synchromesh.values.boxes import Box, full_box

Kind = Literal["R", "r", "P", "S"]


@dataclass(frozen=True, order=True)
class Placement:
    """A state on the tensor axis; `dim` (never negative), `segments` and `unit` are of S only."""

    kind: Kind
    dim: int = 0
    segments: int = 1
    unit: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        numbers = [self.dim, self.segments, self.unit]
        while len(numbers) > 1 and numbers[-1] == 1:
            numbers.pop()
        return f"S({', '.join(map(str, numbers))})"

    @property
    def sharded(self) -> bool:
        return self.kind == "S"

    def at(self, dim: int) -> "Placement":
        """The same along dimension `dim`, which is as long."""
        return replace(self, dim=dim)

    def units(self, length: int) -> int:
        """Units in each segment of a dimension of `length` entries; 0: no whole number."""
        return 0 if length % (self.segments * self.unit) else length // self.segments // self.unit

    def even(self, length: int, size: int) -> bool:
        return self.units(length) % size == 0

    def fits(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether a `shape` can be placed so over `size` ranks, and no plainer form says that."""
        if self.kind != "S" or size == 1:
            return True
        if self.dim >= len(shape):
            return False
        count = self.units(shape[self.dim])
        return self.unit == 1 if count and count % size == 0 else count > 1

    def share(self, length: int, size: int, index: int) -> tuple[int, int]:
        """[start, stop) of rank `index` of `size` within each segment of `length` entries."""
        each, more = divmod(self.units(length), size)
        start = index * each + min(index, more)
        return start * self.unit, (start + each + (index < more)) * self.unit

    def local_shape(self, shape: tuple[int, ...], size: int, index: int = 0) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor of `shape`; the first rank's is the largest."""
        if self.kind != "S":
            return tuple(shape)
        assert self.units(shape[self.dim]), f"{self} of {shape}"
        start, stop = self.share(shape[self.dim], size, index)
        return (*shape[: self.dim], self.segments * (stop - start), *shape[self.dim + 1 :])

    def padded_bytes(self, bytes_: int, shape: tuple[int, ...], size: int) -> int:
        """Bytes that gathering or scattering moves: as if every rank had as much as the first."""
        if self.kind != "S" or self.even(shape[self.dim], size):
            return bytes_
        largest = self.local_shape(shape, size)[self.dim]
        return bytes_ // shape[self.dim] * largest * size

    def boxes(self, shape: tuple[int, ...], size: int, index: int) -> tuple[Box, ...]:
        """The boxes of a tensor of global `shape` that rank `index` has, in local order."""
        full = full_box(shape)
        if self.kind != "S":
            return (full,)
        segment = shape[self.dim] // self.segments
        start, stop = self.share(shape[self.dim], size, index)
        ranges = ((s * segment + start, s * segment + stop) for s in range(self.segments))
        return tuple((*full[: self.dim], own, *full[self.dim + 1 :]) for own in ranges)


REPLICATED = Placement("R")
REPLICATED_PARTIAL_GRADIENT = Placement("r")
PARTIAL = Placement("P")


def shard(dim: int, segments: int = 1, unit: int = 1) -> Placement:
    return Placement("S", dim, segments, unit)


def shard_units(length: int, size: int, dim: int, segments: int, unit: int) -> Placement:
    """S(dim, segments, unit) of `length` entries over `size` ranks, in its plainest form."""
    placement = shard(dim, segments, unit)
    return shard(dim, segments) if placement.even(length, size) else placement


@cache
def parse(text: str) -> Placement:
    """The placement whose text form (`str(placement)`) is `text`."""
    if text in ("R", "r", "P"):
        return Placement(text)  # type: ignore[arg-type]
    numbers = [int(n) for n in text.removeprefix("S(").removesuffix(")").split(",")]
    return Placement("S", *numbers)
