"""A late loss: a number that other ranks are still computing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


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
