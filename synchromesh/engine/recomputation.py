"""Recomputation of activations (Chen et al. 2016, arXiv 1604.06174): a component keeps its inputs,
and computes in its backward again what autograd would have kept of its forward.

    forward     inputs -> [a -> b -> c -> all-reduce] -> outputs      autograd keeps numbers
    backward    inputs -> [a -> b -> c                                when it asks for the first

The second walk ends with the last operator of which anything was kept (`kept.repeated`): the
traffic behind it is not repeated.

Inputs and parameters, which are there anyway, are kept as they are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from synchromesh.programs.walk import Walk


class Recomputation:
    """What autograd keeps of one walk through a component.

    again: the walk as far as is needed, from the same inputs, with the same draws of random
    numbers, without effects. there: what stays."""

    def __init__(self, again: Callable[[], Walk], there: list[Tensor]) -> None:
        self._again = again
        self._there = {_place(x) for x in there}
        self._count = 0
        self._computed: dict[int, Tensor] = {}

    def watched(self, walk: Walk) -> Walk:
        """The walk, of which autograd keeps numbers alone."""
        while True:
            with saved_tensors_hooks(self._pack, self._unpack):
                try:
                    next(walk)
                except StopIteration as end:
                    results: tuple[Tensor, ...] = end.value
                    return results
            yield

    def _pack(self, x: Tensor) -> Any:
        if _place(x) in self._there:
            return x
        self._count += 1
        return self._count - 1

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept not in self._computed:
            self._compute()
        return self._computed.pop(kept)

    def _compute(self) -> None:
        number = 0

        def pack(x: Tensor) -> Any:
            nonlocal number
            if _place(x) in self._there:
                return None
            self._computed[number] = x.detach()
            number += 1
            return None

        def unpack(_: Any) -> Tensor:
            raise AssertionError("nothing goes back through what was computed again")

        with (
            torch.enable_grad(),
            torch._C.DisableTorchFunction(),
            saved_tensors_hooks(pack, unpack),
        ):
            for _ in self._again():
                pass  # what is under way is waited for when the walk goes on
        assert number == self._count, f"{number} tensors computed again, {self._count} kept"


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how: equal for tensors of the same entries."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()
