"""A batch: a nest of tensors whose dimension 0 is rows."""

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def leaves(batch: Any) -> list[Tensor]:
    """The tensors of a batch in flattening order."""
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]


def row_count(batch: Any) -> int:
    """Rows of a batch: dimension 0 of every tensor that has dimensions."""
    counts = {x.shape[0] for x in leaves(batch) if x.dim()}
    if len(counts) != 1:
        raise ValueError(
            "the tensors of a batch must have the same number of rows in dimension 0, got "
            f"{sorted(counts)}; "
            "values common to all rows may be 0-d tensors or plain numbers"
            if counts
            else "a batch needs at least one tensor with rows in dimension 0, got none"
        )
    return counts.pop()
