"""The roofline of operators: their seconds on a device that is not there, from flops and bytes.

    seconds = max(flops / F, bytes / W) + LAUNCH_SECONDS        of one operator
    F       floating-point operations a second that the device achieves in the operator's dtype
    W       bytes a second of its memory (0 in the cluster's file: not known, then left out)

Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model",
https://doi.org/10.1145/1498765.1498785. Operators are those that eager PyTorch runs, seen below
autograd by a dispatch mode; they may run on fake tensors, which have shapes and no numbers. Their
floating-point operations are counted by the formulas of `torch.utils.flop_counter` (products,
convolutions, attention; a multiplication and an addition are two); everything else is bound by
bytes. A view costs nothing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.values.cluster import Device

# What every operator costs besides: about what launching an empty kernel takes. Assumed, from no
# data sheet; where operators are that short, the interpreter may well take longer.
LAUNCH_SECONDS = 5e-6

_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)
_GATHERS = (_aten.embedding, _aten.index_select, _aten.index, _aten.gather)  # read what they give
_UNWRITTEN = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)


@dataclass(frozen=True)
class Operation:
    """One operator that ran: floating-point operations, bytes read and written, of which type."""

    flops: int
    bytes: int
    dtype: str  # of its first tensor; "" where it had none
    convolution: bool = False


class Operations(TorchDispatchMode):
    """`operators` that ran inside; views and what touches no tensor are left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        question = func.namespace == "prim"  # to a fake tensor: on which device it pretends to be
        if not (question or _is_view(func) or func.overloadpacket in _UNWRITTEN):
            ran = _operation(func, args, given, made)
            if ran.dtype:  # a mark of the profiler has none
                self.operators.append(ran)
        return made


def _is_view(func: Any) -> bool:
    """Whether the operator gives out what it was given, unwritten: a view or an alias."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


def _operation(func: Any, args: Any, kwargs: Any, made: Any) -> Operation:
    read = _tensors((args, kwargs))
    written = _tensors(made)
    if not written and func._schema.is_mutable:  # for one, `_foreach_add_` returns nothing
        changed = [
            value
            for spec, value in zip(func._schema.arguments, args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]
        written = _tensors(changed)
    if func.overloadpacket in _GATHERS:
        read = [*written, *_tensors(args[1:])]
    formula = _FORMULAS.get(func.overloadpacket)
    first = next(iter(_tensors((args, kwargs)) + written), None)
    return Operation(
        0 if formula is None else int(formula(*args, **kwargs, out_val=made)),
        sum(map(touched, read)) + sum(map(touched, written)),
        "" if first is None else str(first.dtype).removeprefix("torch."),
        func.overloadpacket in _CONVOLUTIONS,
    )


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def touched(x: Tensor) -> int:
    """Bytes that reading or writing all of a tensor moves; an expanded one repeats what it has."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def seconds(operations: Iterable[Operation], device: Device) -> float:
    """What operators take one after another. ValueError for a type without a known rate."""
    total = 0.0
    for o in operations:
        moved = o.bytes / device.bytes_per_second if device.bytes_per_second else 0.0
        computed = o.flops / rate(device, o.dtype, o.convolution) if o.flops else 0.0
        total += max(computed, moved) + LAUNCH_SECONDS
    return total


def rate(device: Device, dtype: str, convolution: bool = False) -> float:
    """Floating-point operations a second in `dtype`: the device's own figure, or the nearest. A
    convolution in float32 runs in tf32 where the device can: that is PyTorch's default, while
    products stay in float32. A 16-bit type that the device lacks is computed in float32, float64
    (no data sheet in the catalogue has it) at half of float32's rate."""
    known = device.flops
    if dtype == "float32" and convolution and "tf32" in known:
        return known["tf32"]
    if dtype in known:
        return known[dtype]
    if "float32" not in known:
        listed = ", ".join(known) or "none"
        raise ValueError(
            f"device {device.kind}: no rate of {dtype} or float32 is known (known: {listed}); "
            "add it to `flops` in the cluster's file, or let `synchromesh doctor` measure it"
        )
    return known["float32"] / 2 if dtype == "float64" else known["float32"]
