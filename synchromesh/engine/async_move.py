"""A journey: a tensor under way between ranks, as two autograd nodes between which others may run.

    forward     depart: begins to send            ...   arrive: waits, gives the result
    backward    depart: waits, gives the gradient ...   arrive: begins to send the gradient

Autograd runs backward in the reverse order of forward, so what was computed between departure and
arrival in forward is computed between them in backward too: both directions overlap. The token
that joins the two nodes carries no data.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.engine.communicator import Finish

Begin = Callable[[Tensor], Finish]


class _Journey:
    """What is under way: the value in forward, its gradient in backward."""

    def __init__(self, forward: Begin, backward: Begin) -> None:
        self.forward, self.backward = forward, backward
        self._finish: Finish | None = None

    def begin(self, finish: Finish) -> None:
        self._finish = finish

    def end(self) -> Tensor:
        assert self._finish is not None, "an arrival follows its departure"
        finish, self._finish = self._finish, None
        return finish()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.begin(journey.forward(x))
        return x.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.journey.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.journey.begin(ctx.journey.backward(gradient))
        return gradient.new_zeros(1), None


def journey(x: Tensor, forward: Begin, backward: Begin) -> Finish:
    """Sends `x` off by `forward`; the function that waits for its arrival. Its gradient goes by
    `backward`."""
    way = _Journey(forward, backward)
    token = _Depart.apply(x, way)
    return lambda: _Arrive.apply(token, way)
