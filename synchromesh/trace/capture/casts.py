"""Casts: the types to which autocast converts the inputs of an operator, found by asking it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from synchromesh.trace import meta

CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Autocast:
    """An autocast region: device type and its lower precision."""

    device: str
    dtype: torch.dtype


def casts(
    region: Autocast, target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    """The type to which the floating inputs of `target` are to be cast, None for no cast.

    Autocast's lists of operators differ between devices and versions, so the operator is run on
    fake tensors: all inputs in float32 give the lower precision (as linear does), or all in the
    lower precision give float32 (as cross-entropy does)."""
    with FakeTensorMode():
        vals = map_arg((args, dict(kwargs)), stand_in)
    tensors = [
        v for v in pytree.tree_leaves(vals) if isinstance(v, Tensor) and v.dtype in CASTABLE
    ]
    if not tensors or target._schema.name in ("aten::to", "aten::_to_copy"):
        return None
    if result_type(region, target, vals, torch.float32) == region.dtype:
        return region.dtype
    raised = result_type(region, target, vals, region.dtype) == torch.float32
    lower_without = result_type(None, target, vals, region.dtype) == region.dtype
    return torch.float32 if raised and lower_without else None


def stand_in(node: torch.fx.Node) -> Any:
    """A fake tensor or integer for the node, of the example's sizes (symbols get bound)."""
    val = meta.val(node)
    if isinstance(val, Tensor):
        shape = [s if isinstance(s, int) else int(s.node.hint) for s in val.shape]
        return torch.empty(shape, dtype=val.dtype, device=val.device)
    if meta.role(node) == "rows":
        return meta.example_rows(node)
    arguments = map_arg(node.args, stand_in)
    return node.target(*arguments) if callable(node.target) else val


def result_type(
    region: Autocast | None, target: torch._ops.OpOverload, vals: Any, dtype: torch.dtype
) -> torch.dtype | None:
    """Type of the operator's (first) result when all its castable inputs have `dtype`."""

    def convert(v: Any) -> Any:
        castable = isinstance(v, Tensor) and v.dtype in CASTABLE
        return torch.empty_like(v, dtype=dtype) if castable else v

    mode = next(v.fake_mode for v in pytree.tree_leaves(vals) if isinstance(v, FakeTensor))
    device = region.device if region else "cpu"
    with (
        mode,
        torch.no_grad(),
        torch.autocast(device, region.dtype if region else None, enabled=region is not None),
    ):
        args, kwargs = pytree.tree_map(convert, vals)
        try:
            made = target(*args, **kwargs)
        except Exception:
            return None  # the operator refuses this type: autocast would not give it to it
    first = next((v for v in pytree.tree_leaves(made) if isinstance(v, Tensor)), None)
    return None if first is None else first.dtype
