"""A local tensor: the boxes of a global tensor on a rank, and where its tensor has them.

The local tensor is its boxes one after the other along the one dimension in which they differ:
rank 1 of 2 holds rows 2-3 and 6-7 of a tensor of two segments as a local tensor of 4 rows:

    global rows    0 1 2 3 | 4 5 6 7        local rows    2 3 6 7
    rank           0 0 1 1 | 0 0 1 1"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from synchromesh.values.placement import Box
from synchromesh.values.transfer import volume


@dataclass(frozen=True)
class LocalTensor:
    """What one rank has of the tensor `name` of global `shape`."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]  # in local order; none on a rank that has nothing of it
    tensor: Tensor

    def __post_init__(self) -> None:
        expected = local_shape(self.boxes, len(self.shape))
        assert not self.boxes or tuple(self.tensor.shape) == expected, (
            f"{self.name}: local shape {tuple(self.tensor.shape)}, but the boxes make {expected}"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the global tensor too."""
        return self.tensor.dtype

    def view(self, box: Box) -> Tensor:
        """The view of the local tensor that is `box`, which one of the boxes contains."""
        return box_view(self.tensor.detach(), self.boxes, box)


def full_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, n) for n in shape)


def join_dim(boxes: Sequence[Box]) -> int:
    """The dimension along which the local tensor is put together."""
    differing = {
        d
        for box in boxes[1:]
        for d, (side, first) in enumerate(zip(box, boxes[0], strict=True))
        if side != first
    }
    assert len(differing) <= 1, f"boxes {boxes} differ in dimensions {sorted(differing)}"
    return differing.pop() if differing else 0


def local_shape(boxes: Sequence[Box], dims: int) -> tuple[int, ...]:
    """Shape of the local tensor of `boxes`; without boxes it is empty."""
    if not boxes:
        return (0,) * max(dims, 1)
    shape = [stop - start for start, stop in boxes[0]]
    if shape:
        d = join_dim(boxes)
        shape[d] = sum(box[d][1] - box[d][0] for box in boxes)
    return tuple(shape)


def box_view(local: Tensor, boxes: Sequence[Box], box: Box) -> Tensor:
    """The view of `local`, which is `boxes`, that is `box`."""
    if not box:
        return local
    d = join_dim(boxes)
    before = 0
    for outer in boxes:
        if all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, box, strict=True)):
            shift = [start - a for (a, _), (start, _) in zip(outer, box, strict=True)]
            shift[d] += before
            lengths = (stop - start for start, stop in box)
            return local[tuple(slice(s, s + n) for s, n in zip(shift, lengths, strict=True))]
        before += outer[d][1] - outer[d][0]
    raise AssertionError(f"{box} is in none of {boxes}")


def split(box: Box, most: int) -> list[Box]:
    """`box` in parts of at most `most` elements, halved along its first divisible dimension."""
    if volume(box) <= most:
        return [box]
    d = next(i for i, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[d]
    middle = (start + stop) // 2
    halves = (*box[:d], (start, middle), *box[d + 1 :]), (*box[:d], (middle, stop), *box[d + 1 :])
    return [part for half in halves for part in split(half, most)]
