"""Symbolic functions: what torch computes with numbers of rows, computed with their symbol."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SymbolicFunctions(TorchFunctionMode):
    """Inside, functions that would fix the rows of a trace are others of the same values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.take_along_dim, Tensor.take_along_dim):
            return take_along_dim(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None, **rest: Any) -> Tensor:
    """As `torch.take_along_dim`: a gather, in front of which all other dims are broadcast."""
    if dim is None or rest or input.dim() != indices.dim():
        return torch.take_along_dim(input, indices, dim, **rest)
    sizes, wanted = list(input.shape), list(indices.shape)
    length, taken = sizes[dim], wanted[dim]
    sizes[dim] = wanted[dim] = 1
    sizes = list(torch.broadcast_shapes(sizes, wanted))
    sizes[dim], wanted = length, [*sizes]
    wanted[dim] = taken
    return input.expand(sizes).gather(dim, indices.expand(wanted))
