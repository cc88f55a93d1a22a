"""An asynchronous move: a tensor under way between ranks, as two autograd nodes between which
others may run.

    forward     depart: begins to send            ...   arrive: waits, gives the result
    backward    depart: waits, gives the gradient ...   arrive: begins to send the gradient

Autograd runs backward in the reverse order of forward, so what was computed between departure and
arrival in forward is computed between them in backward too: both directions overlap. The token
that joins the two nodes carries no data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.programs.communicator import Finish

Begin = Callable[[Tensor], Finish]


class _AsyncMove:
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
    def forward(ctx: Any, x: Tensor, move: _AsyncMove) -> Tensor:
        ctx.move = move
        move.begin(move.forward(x))
        return x.new_zeros(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.move.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, move: _AsyncMove) -> Tensor:
        ctx.move = move
        return move.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.move.begin(ctx.move.backward(gradient))
        return gradient.new_zeros(1), None


def async_move(x: Tensor, forward: Begin, backward: Begin) -> Finish:
    """Begins to send `x` by `forward`; the function that waits for its arrival.

    backward: sends the gradient of what arrives back to where `x` came from."""
    move = _AsyncMove(forward, backward)
    token = _Depart.apply(x, move)
    return lambda: _Arrive.apply(token, move)
