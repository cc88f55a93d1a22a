"""Random rounding: a run in which every result is moved by about one rounding, to see how far
rounding alone goes.

Another order of the same operations rounds otherwise. Monte Carlo arithmetic (Parker, Pierce and
Eggert, "Monte Carlo Arithmetic", 2000) shows what that does without knowing the orders: each
floating-point result is moved at random in its last place, in the type that it is computed in, so
that a norm or a softmax in single precision inside a float64 model shows as what it is."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Results that are entries of their inputs, or whole numbers: nothing is rounded, and a model may
# compare them with what they were taken from, or count with them.
EXACT = frozenset(
    {
        "abs", "adaptive_max_pool2d", "adaptive_max_pool3d", "amax", "amin", "cat",
        "ceil", "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "copy_",
        "cummax", "cummin", "embedding", "fill", "fill_", "flip", "floor", "gather", "hardtanh",
        "hardtanh_", "index", "index_select", "kthvalue", "masked_fill", "masked_fill_", "max",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "maximum", "median", "min",
        "minimum", "neg", "relu", "relu_", "repeat", "roll", "round", "scatter", "sign", "sort",
        "stack", "take", "topk", "tril", "triu", "trunc", "where",
    }
)  # fmt: skip

# Operators that add the values of a channel one after another, n of them: their order matters by
# far more than one rounding, about sqrt(n) of them. They run from the last value to the first:
# name -> which arguments, and which results, have the rows.
SEQUENTIAL = {"native_batch_norm": ((0,), 0), "native_batch_norm_backward": ((0, 1), 0)}


class RandomRounding(TorchDispatchMode):
    """Inside, results that depend on parameters become x (1 + e), e at random plus or minus the
    spacing of their type. Zeros stay, and what might overflow (masks).

    What no parameter reaches (masks, positions, buckets of distances) is every order's own and
    stays as it is. Reproducible: the numbers depend on `seed` and the operators alone."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator(device).manual_seed(seed)

    def move_(self, x: Tensor) -> None:
        kind = torch.finfo(x.dtype)
        factor = torch.empty_like(x, dtype=x.real.dtype if x.is_complex() else x.dtype)
        factor.bernoulli_(0.5, generator=self._generator).mul_(2 * kind.eps).add_(1 - kind.eps)
        x.mul_(factor.masked_fill_(x.abs() > kind.max / 2, 1.0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _reversed(func, args, kwargs or {})
        # in backward, where autograd calls, inputs do not say what they depend on
        moves = torch._C._current_graph_task_id() != -1 or (
            func._overloadpacket.__name__ not in EXACT
            and any(x.requires_grad for x in _tensors((args, kwargs)))
        )
        if _is_view(func) or not moves:
            return made
        for x in _tensors(made):
            if (x.is_floating_point() or x.is_complex()) and x.layout is torch.strided:
                self.move_(x)
        return made


def _reversed(func: Any, args: Any, kwargs: Any) -> Any:
    """The results of an operator, in the other order of its sums where they are sequential."""
    name = func._overloadpacket.__name__
    if name not in SEQUENTIAL:
        return func(*args, **kwargs)
    given, result = SEQUENTIAL[name]
    rows = [d for d in range(args[0].dim()) if d != 1]
    made = [*func(*(x.flip(rows) if i in given else x for i, x in enumerate(args)), **kwargs)]
    if made[result] is not None:  # a gradient that nobody asks for
        made[result] = made[result].flip(rows)
    return tuple(made)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _is_view(func: Any) -> bool:
    """Whether a result is a view of an input, which computes nothing."""
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )
