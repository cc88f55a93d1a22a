"""The sums of a loss over the rows of a rank, and of all, from which its global mean is made; a
late loss, a number that other ranks are still computing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from synchromesh.engine.agreement import LossSum
from synchromesh.engine.program import RankOutputs


def add_loss(result: RankOutputs, sums: Tensor) -> None:
    """Adds what this rank has computed of a micro-batch to its sums, by `LossSum`."""
    if any(value.requires_grad for value in result.outputs):
        sums[LossSum.GRADIENT].fill_(1)
    if not (result.rows and result.leads):
        return
    value, weighted = result.outputs[0].detach(), len(result.outputs) == 2
    sums[LossSum.VALUE].add_(value if weighted else value * result.rows)
    sums[LossSum.WEIGHT].add_(result.outputs[1].detach() if weighted else result.rows)
    sums[LossSum.PAIR].fill_(weighted)  # `= weighted` would copy from the host, and wait


def refuse_sums(sums: Sequence[float]) -> None:
    """ValueError for sums over all ranks of which no step could be made."""
    if not sums[LossSum.GRADIENT]:
        raise ValueError(
            "the loss depends on no parameter that is trained, so that a step would "
            "change none of them: it is detached, a whole number or computed under "
            "torch.no_grad, or all parameters are frozen"
        )
    if not sums[LossSum.WEIGHT]:
        raise ValueError(
            "the loss's weight is 0 over all ranks (nothing in the batch counts), so its "
            "mean is not defined: leave such a batch out"
        )


class LateLoss(Tensor):
    """A loss (0-d, float64); whatever is done with it waits until it is known."""

    _find: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def of(find: Callable[[], Tensor]) -> "LateLoss":
        """find: waits for the loss; is called once."""
        made: LateLoss = Tensor._make_subclass(LateLoss, torch.empty((), dtype=torch.float64))
        made._find, made._value = find, None
        return made

    def known(self) -> Tensor:
        """The loss itself."""
        if self._value is None:
            self._value = self._find()
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(LateLoss, LateLoss.known, (args, kwargs or {}))
        return func(*args, **kwargs)
