"""A stand-in for a workload's model, for commands that train nothing: the same model, whose large
tensors repeat some random numbers where the model would draw each anew.

GPT-2 small draws 124 million numbers for 2 s; copying what was drawn takes a tenth of that."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.workloads.workload import Workload

# How many numbers are drawn. A prime: neither rows nor columns of a weight come out equal.
DRAWN = 999_983

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def stand_in(workload: Workload) -> nn.Module:
    """The workload's model with such numbers."""
    with _DrawnOnce():  # type: ignore[no-untyped-call]
        return workload.build()


def _large(x: Tensor) -> bool:
    return x.numel() > DRAWN and x.is_contiguous() and not x.is_meta


class _DrawnOnce(TorchDispatchMode):
    """Fills a large tensor with the first numbers of its fill, again and again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in _DRAWS or not _large(x := args[0]):
            return func(*args, **given)
        flat = x.view(-1)
        func(flat[:DRAWN], *args[1:], **given)
        filled = DRAWN
        while filled < len(flat):
            more = min(filled, len(flat) - filled)
            flat[filled : filled + more] = flat[:more]
            filled += more
        return x
