"""A local tensor: the boxes of a global tensor on a rank, and the tensor that has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from synchromesh.values.boxes import Box, local_shape, place


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
        return self.tensor.dtype

    def view(self, box: Box) -> Tensor:
        """The view of the local tensor that is `box`, which one of the boxes contains."""
        return box_view(self.tensor.detach(), self.boxes, box)


def box_view(local: Tensor, boxes: Sequence[Box], box: Box) -> Tensor:
    """The view of `local`, which is `boxes`, that is `box`."""
    return local[tuple(slice(first, first + n) for first, n in place(box, boxes))]
