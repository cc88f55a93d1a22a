"""The moves of a tensor axis: from one placement to another, value and gradient.

`TABLE` is the table of docs/design.md, "The local graph": for each pair of placements the
primitive that converts the value in forward, and the one that converts the gradient back.
"""

from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.engine.async_move import async_move
from synchromesh.engine.batch_norm import BatchNormPolicy
from synchromesh.engine.communicator import Communicator, Finish
from synchromesh.engine.random import RandomStreams
from synchromesh.values.placement import Placement, parse

Primitive = Callable[
    [Tensor, Communicator, Placement, Placement], Finish
]  # (x, group, source, target)


def part(x: Tensor, placement: Placement, size: int, index: int) -> Tensor:
    """The local part of rank `index` of `size` of a global tensor under a sharded placement."""
    dim, segments = placement.dim, placement.segments
    assert x.shape[dim] % (segments * size) == 0, f"{placement} of {tuple(x.shape)} over {size}"
    if segments == 1:
        length = x.shape[dim] // size
        return x.narrow(dim, index * length, length)
    parts: Tensor = x.unflatten(dim, (segments, size, -1))
    return parts.select(dim + 1, index).flatten(dim, dim + 1)


def join(parts: Tensor, placement: Placement) -> Tensor:
    """The global tensor of (size, *part): the inverse of `part`."""
    dim, segments = placement.dim, placement.segments
    if segments == 1:
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    split: Tensor = parts.unflatten(dim + 1, (segments, -1))
    return split.movedim(0, dim + 1).flatten(dim, dim + 2)


def _identity(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    return lambda: x.view_as(x)


def _copy(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    """As `_identity` for gradients, which may become a leaf's `grad`: autograd would take a view
    of another leaf's memory for it, and add to it in place.
    """
    return lambda: x.clone()


def _divide(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    if x.is_floating_point() or x.is_complex():
        return lambda: x / group.size
    return lambda: x.clone() if group.index == 0 else torch.zeros_like(x)


def _all_reduce(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    return group.start_all_reduce(x)


def _slice(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    # a copy, as in `_copy`; a view would keep all of `x` alive besides
    local = part(x, target, group.size, group.index)
    return lambda: local.clone(memory_format=torch.contiguous_format)


def _zeros(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    def finish() -> Tensor:
        shape = list(x.shape)
        shape[source.dim] *= group.size
        full = x.new_zeros(shape)
        if source.segments == 1:
            part(full, source, group.size, group.index).copy_(x)
        else:  # a view through unflatten, for `part` copies
            view = full.unflatten(source.dim, (source.segments, group.size, -1))
            view.select(source.dim + 1, group.index).copy_(
                x.unflatten(source.dim, (source.segments, -1))
            )
        return full

    return finish


def _all_gather(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    gather = group.start_all_gather(x)
    return lambda: join(gather(), source)


def _reduce_scatter(
    x: Tensor, group: Communicator, source: Placement, target: Placement
) -> Finish:
    dim, segments = target.dim, target.segments
    parts = x.detach().unflatten(dim, (segments, group.size, -1)).movedim(dim + 1, 0)
    scatter = group.start_reduce_scatter(parts)
    return lambda: scatter().flatten(dim, dim + 1)


def _all_to_all(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    x = x.detach()
    if source.dim != target.dim:
        parts = [part(x, target, group.size, i) for i in range(group.size)]
        sent = group.start_all_to_all(parts)
        return lambda: join(torch.stack(sent()), source)
    dim = source.dim
    length = x.shape[dim] * group.size
    outward, inward = _crossings(length, source, target, group.size, group.index)
    sends = [x.index_select(dim, i.to(x.device)) for i in outward]
    shapes = [(*x.shape[:dim], len(i), *x.shape[dim + 1 :]) for i in inward]
    sent = group.start_all_to_all(sends, shapes)
    return lambda: torch.empty_like(x, memory_format=torch.contiguous_format).index_copy_(
        dim, torch.cat(inward).to(x.device), torch.cat(sent(), dim)
    )


@lru_cache(maxsize=256)
def _crossings(
    length: int, source: Placement, target: Placement, size: int, index: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Between two shardings of a dimension: positions to send to, and to fill from, each rank."""
    entries = torch.arange(length)
    flat = Placement("S", 0, source.segments), Placement("S", 0, target.segments)
    there = [part(entries, flat[0], size, i) for i in range(size)]
    wanted = [part(entries, flat[1], size, i) for i in range(size)]
    outward = tuple(torch.isin(there[index], w).nonzero().view(-1) for w in wanted)
    place = torch.empty(length, dtype=torch.int64)
    place[wanted[index]] = torch.arange(len(wanted[index]))
    inward = tuple(place[h[torch.isin(h, wanted[index])]] for h in there)
    return outward, inward


TABLE: dict[tuple[str, str], tuple[Primitive, Primitive]] = {
    ("R", "r"): (_identity, _all_reduce),
    ("P", "R"): (_all_reduce, _identity),
    ("P", "r"): (_all_reduce, _all_reduce),
    ("R", "S"): (_slice, _all_gather),
    ("r", "S"): (_slice, _zeros),
    ("S", "R"): (_all_gather, _slice),
    ("S", "r"): (_all_gather, _reduce_scatter),
    ("P", "S"): (_reduce_scatter, _all_gather),
    ("S", "P"): (_zeros, _slice),
    ("R", "P"): (_divide, _copy),
    ("r", "P"): (_divide, _divide),
    ("r", "R"): (_identity, _divide),
    ("S", "S"): (_all_to_all, _all_to_all),
}


QUIET = {_identity, _copy, _divide, _slice, _zeros}  # primitives that send nothing


class _Move(torch.autograd.Function):
    """A move that sends nothing in either direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Communicator, source: Placement, target: Placement
    ) -> Tensor:
        ctx.move = group, source, target
        return TABLE[source.kind, target.kind][0](x, group, source, target)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group, source, target = ctx.move
        back = TABLE[source.kind, target.kind][1]
        return back(gradient, group, target, source)(), None, None, None


def depart(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Finish:
    """Begins the move of `x` on the ranks of `group` from `source` to `target`; the function that
    ends it.

    Where `x` needs no gradient nothing is sent in backward; integers are moved forward alone.
    """
    if source == target or group.size == 1:
        return lambda: x
    forward, back = TABLE[source.kind, target.kind]
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (lambda: x) if forward is _identity else forward(x, group, source, target)
    if forward in QUIET and back in QUIET:
        return lambda: _Move.apply(x, group, source, target)
    return async_move(
        x,
        lambda value: forward(value, group, source, target),
        lambda gradient: back(gradient, group, target, source),
    )


def move(x: Tensor, group: Communicator, source: Placement, target: Placement) -> Tensor:
    """`depart` and arrival at once."""
    return depart(x, group, source, target)()


class TensorAxis:
    """The tensor axis of one layout on this rank; implements `trace.partition.axis.Axis`."""

    def __init__(self, group: Communicator, streams: RandomStreams, norm: BatchNormPolicy) -> None:
        self.group, self.streams, self.norm = group, streams, norm
        self.size, self.index = group.size, group.index
        self.real_rows = 1  # of the block being computed; 0: what is computed is a stand-in

    def move(self, x: Tensor, source: str, target: str) -> Tensor:
        """`x` from one placement to another, value and gradient."""
        return move(x, self.group, parse(source), parse(target))

    def moving(self, x: Tensor, source: str, target: str) -> Generator[None, None, Tensor]:
        """`move` that pauses once between departure and arrival."""
        arrive = depart(x, self.group, parse(source), parse(target))
        yield
        return arrive()

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise largest of the ranks' `x`, without gradient."""
        largest = x.detach().clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(largest, "max")
        return largest

    def stream(self, key: int, sharded: bool, rows: bool) -> None:
        """Seeds the default generator for random operator `key`."""
        self.streams.seed(key, sharded, rows)

    def batch_norm(self, *arguments: Any) -> Tensor:
        """Batch norm as its policy says; arguments as of the protocol."""
        return self.norm.apply(*arguments, real=self.real_rows > 0)
