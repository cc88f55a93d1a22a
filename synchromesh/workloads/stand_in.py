"""A stand-in for a workload's model, for commands that train nothing: the same model, whose large
tensors repeat some random numbers where the model would draw each anew.

GPT-2 small draws 124 million numbers for 2 s; copying what was drawn takes a tenth of that."""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from synchromesh.workloads.workload import Workload

_DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


def stand_in(workload: Workload) -> nn.Module:
    with _DrawnOnce():  # type: ignore[no-untyped-call]
        return workload.build()


class _DrawnOnce(TorchDispatchMode):
    """Fills a large tensor with the first numbers of its fill, again and again."""

    # How many numbers are drawn. A prime: neither rows nor columns of a weight come out equal.
    DRAWN: ClassVar[int] = 999_983

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, x = kwargs or {}, args[0] if func in _DRAWS else None
        if x is None or x.numel() <= self.DRAWN or x.is_meta or not x.is_contiguous():
            return func(*args, **given)
        flat = x.view(-1)
        func(flat[: self.DRAWN], *args[1:], **given)
        filled = self.DRAWN
        while filled < len(flat):
            more = min(filled, len(flat) - filled)
            flat[filled : filled + more] = flat[:more]
            filled += more
        return x
