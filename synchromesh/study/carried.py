"""The carry of a recurrent workload, for training loops that are not ours: of this rank's rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.trace.capture.batch import row_count


class CarriedCalls:
    """`function(model, batch, carry) -> (result, carry)` as a function of model and batch, which
    hands the carry on from one batch to the next, detached.

    start: rows of a batch -> the carry at the beginning of a stream."""

    def __init__(
        self, function: Callable[..., tuple[Any, Any]], start: Callable[[int], Any],
        device: torch.device,
    ) -> None:  # fmt: skip
        self._function, self._start, self._device = function, start, device
        self._carry: Any = None

    def restart(self) -> None:
        """The next batch begins the streams anew."""
        self._carry = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._carry is None:
            self._carry = self._each(self._start(row_count(batch)), lambda x: x.to(self._device))
        result, carry = self._function(model, batch, self._carry)
        self._carry = self._each(carry, Tensor.detach)
        return result

    @staticmethod
    def _each(carry: Any, do: Callable[[Tensor], Tensor]) -> Any:
        return pytree.tree_map(lambda x: do(x) if isinstance(x, Tensor) else x, carry)
