"""A batch: its tensor leaves, and the rows that dim 0 of them is."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Leaf:
    """A tensor leaf of the batch; its dim 0 is rows, but 0-d tensors are common to all of them."""

    name: str
    tensor: Tensor


def know_encodings() -> None:
    """Lets pytrees see inside batches of transformers' tokenizers, whose mapping is no dict, where
    it is imported."""
    kind = getattr(sys.modules.get("transformers.tokenization_utils_base"), "BatchEncoding", None)
    if kind is None or kind in pytree.SUPPORTED_NODES:
        return

    def keyed(batch: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
        return [(pytree.MappingKey(k), v) for k, v in batch.items()], list(batch)

    pytree.register_pytree_node(
        kind, lambda batch: (list(batch.values()), list(batch)),
        lambda values, keys: kind(dict(zip(keys, values, strict=True))),
        serialized_type_name="transformers.BatchEncoding", flatten_with_keys_fn=keyed,
    )  # fmt: skip


def leaves(batch: Any) -> list[Leaf]:
    """The tensor leaves of a batch in flattening order, named by path: `x`, `0`, `inputs.mask`."""
    named = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, Tensor):
            named.append(Leaf(path_name(path), leaf))
        if remedy := undivided(leaf):
            raise ValueError(
                f"the rows of {type(leaf).__name__} ({path_name(path)}) in the batch cannot be "
                f"divided over ranks: {remedy}"
            )
    return named


def path_name(path: Any) -> str:
    keys = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)
    return ".".join(str(k) for k in keys) or "batch"


def undivided(leaf: Any) -> str:
    """What to give instead of a leaf whose rows are not seen; empty for any other."""
    if isinstance(leaf, Tensor):
        dense = leaf.layout is torch.strided and not leaf.is_nested
        return "" if dense else "give a dense tensor (to_dense(), or padded)"
    if isinstance(leaf, np.ndarray):
        return "make it a tensor (torch.as_tensor)" if leaf.ndim else ""
    mapping = isinstance(leaf, Mapping)
    held = leaf.values() if mapping else getattr(leaf, "__dict__", {}).values()
    if not any(isinstance(x, Tensor) for x in held):
        return ""
    return "give dict(batch)" if mapping else "give a dict or a tuple of its tensors"


def rows_of(batch: Any) -> int:
    """Rows of the batch: the size of dim 0 of its tensors; ValueError where they disagree."""
    sizes = {leaf.name: leaf.tensor.shape[0] for leaf in leaves(batch) if leaf.tensor.dim()}
    if not sizes:
        raise ValueError(
            f"the batch ({type(batch).__name__}) holds no tensor with rows: it should be a "
            "tensor, or a tuple or dict of tensors whose dim 0 is rows"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"the batch's tensors disagree about the number of rows ({listed}): dim 0 of each "
            "must be rows, or the tensor 0-d if it is common to all rows"
        )
    rows = next(iter(sizes.values()))
    if rows == 0:
        raise ValueError("the example batch has no rows (0): one row at least is needed")
    return rows


def map_rows(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return pytree.tree_map(lambda x: change(x) if isinstance(x, Tensor) and x.dim() else x, batch)


def example(batch: Any, count: int | None = None) -> Any:
    """`batch` with `count` rows, which repeat; else as many as no other dim has (even, from 6)."""
    rows = rows_of(batch)
    taken = {n for leaf in leaves(batch) for n in leaf.tensor.shape[1:]}
    count = count or next(n for n in range(6, 6 + 2 * len(taken) + 2, 2) if n not in taken)

    def resize(leaf: Tensor) -> Tensor:
        if leaf.is_meta:
            return leaf.new_empty((count, *leaf.shape[1:]))
        return leaf.detach()[torch.arange(count, device=leaf.device) % rows]

    return map_rows(batch, resize)


def take(batch: Any, start: int, stop: int) -> Any:
    return map_rows(batch, lambda x: x[start:stop])


def take_parts(batch: Any, parts: Sequence[tuple[int, int]]) -> Any:
    if len(parts) == 1:
        return take(batch, *parts[0])
    return map_rows(batch, lambda x: torch.cat([x[start:stop] for start, stop in parts]))


def copy_of(batch: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)


def pick(batch: Any, rows: Tensor) -> Any:
    return map_rows(batch, lambda x: x[rows.to(x.device)])


def autocast_for(batch: Any, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Autocast on the batch's device; without a type, nothing."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(leaves(batch)[0].tensor.device.type, dtype)


def row_count(batch: Any) -> int:
    """Rows of a batch or of a rank's part, maybe none; ValueError where its tensors disagree."""
    given = pytree.tree_leaves(batch)
    if any(map(undivided, given)):
        leaves(batch)  # says which
    counts = {x.shape[0] for x in given if isinstance(x, Tensor) and x.dim()}
    if len(counts) != 1:
        raise ValueError(
            "the tensors of a batch must have the same number of rows in dimension 0, got "
            f"{sorted(counts)}; "
            "values common to all rows may be 0-d tensors or plain numbers"
            if counts
            else "a batch needs at least one tensor with rows in dimension 0, got none"
        )
    return counts.pop()
