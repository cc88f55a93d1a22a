"""Where a tensor's value and gradient are on the tensor axis, and the boxes that a rank holds of
it.

    R           value replicated, gradient replicated
    r           value replicated, gradient partial (the sum over the ranks is the gradient)
    P           value partial (the sum over the ranks is the value), gradient replicated
    S(d)        value and gradient sharded along dimension d in equal parts
    S(d, n)     the same within each of n equal segments of dimension d (a fused q-k-v weight: n =
    3)

`R -> r` is Megatron's f (identity; all-reduce in backward), `P -> R` its g (arXiv 1909.08053,
section 3).
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dimension, in global coordinates
Kind = Literal["R", "r", "P", "S"]


@dataclass(frozen=True, order=True)
class Placement:
    """A state on the tensor axis; `dim` (never negative) and `segments` mean something for S
    only."""

    kind: Kind
    dim: int = 0
    segments: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.segments == 1 else f"S({self.dim}, {self.segments})"

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of the value."""
        return self.kind == "S"

    def divides(self, shape: tuple[int, ...], size: int) -> bool:
        """Whether `shape` can be placed so over `size` ranks without a remainder."""
        if self.kind != "S":
            return True
        return self.dim < len(shape) and shape[self.dim] % (self.segments * size) == 0

    def local_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Shape of one rank's part of a tensor of global `shape`."""
        if self.kind != "S":
            return tuple(shape)
        assert self.divides(shape, size), f"{self} of {shape} over {size}"
        return (*shape[: self.dim], shape[self.dim] // size, *shape[self.dim + 1 :])

    def boxes(self, shape: tuple[int, ...], size: int, index: int) -> tuple[Box, ...]:
        """The boxes of the tensor of global `shape` that rank `index` of `size` holds, in local
        order."""
        full = tuple((0, n) for n in shape)
        if self.kind != "S":
            return (full,)
        segment = shape[self.dim] // self.segments
        part = segment // size
        starts = (s * segment + index * part for s in range(self.segments))
        return tuple((*full[: self.dim], (a, a + part), *full[self.dim + 1 :]) for a in starts)


REPLICATED = Placement("R")
REPLICATED_PARTIAL_GRADIENT = Placement("r")
PARTIAL = Placement("P")


def shard(dim: int, segments: int = 1) -> Placement:
    """S(dim), or S(dim, segments)."""
    return Placement("S", dim, segments)


@cache
def parse(text: str) -> Placement:
    """The placement whose text form (`str(placement)`) is `text`."""
    if text in ("R", "r", "P"):
        return Placement(text)  # type: ignore[arg-type]
    numbers = [int(n) for n in text.removeprefix("S(").removesuffix(")").split(",")]
    return Placement("S", *numbers)
