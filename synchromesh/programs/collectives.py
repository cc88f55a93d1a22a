"""The moves of a tensor axis: from one placement to another, value and gradient.

`TABLE` is the table of docs/design.md, "The local graph": for each pair of placements the
primitive that converts the value in forward, and the one that converts the gradient back."""

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.programs.batch_norm import BatchNormPolicy, NormArguments
from synchromesh.programs.communicator import Communicator, Finish
from synchromesh.programs.divided_backward import DividedBackward
from synchromesh.programs.random import RandomStreams
from synchromesh.values.placement import Placement, parse, shard

Begin = Callable[[Tensor], Finish]


class _AsyncMove:
    """A tensor under way between ranks, as two autograd nodes between which others may run.

        forward     depart: begins to send            ...   arrive: waits, gives the result
        backward    depart: waits, gives the gradient ...   arrive: begins to send the gradient

    Autograd runs backward in the reverse order of forward, so both directions overlap with what
    was computed between the two. The token that joins the nodes carries no data."""

    def __init__(self, forward: Begin, backward: Begin) -> None:
        self.forward, self.backward = forward, backward
        self.finish: Finish | None = None  # of what is under way

    def end(self) -> Tensor:
        finish, self.finish = self.finish, None
        assert finish is not None, "an arrival follows its departure"
        return finish()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: _AsyncMove) -> Tensor:
        ctx.move = move
        move.finish = move.forward(x)
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
        ctx.move.finish = ctx.move.backward(gradient)
        return gradient.new_zeros(1), None


def async_move(x: Tensor, forward: Begin, backward: Begin) -> Finish:
    """Begins to send `x` by `forward`; waits for its arrival. backward: for its gradient."""
    move = _AsyncMove(forward, backward)
    token = _Depart.apply(x, move)
    return lambda: _Arrive.apply(token, move)


class Transfer(NamedTuple):
    """One direction of a move; length: entries of the dimension that `source` shards."""

    group: Communicator
    source: Placement
    target: Placement
    length: int


Primitive = Callable[[Tensor, Transfer], Finish]


def part(x: Tensor, placement: Placement, size: int, index: int) -> Tensor:
    """The local part of rank `index` of `size` of a global tensor under a sharded placement."""
    dim, segments = placement.dim, placement.segments
    start, stop = placement.share(x.shape[dim], size, index)
    if segments == 1:
        return x.narrow(dim, start, stop - start)
    return _apart(x, dim, segments).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The global tensor of every rank's part: the inverse of `part`."""
    dim, segments = placement.dim, placement.segments
    if segments == 1:
        return torch.cat(tuple(parts), dim)
    return torch.cat([_apart(x, dim, segments) for x in parts], dim + 1).flatten(dim, dim + 1)


def _apart(x: Tensor, dim: int, segments: int) -> Tensor:
    apart: Tensor = x.unflatten(dim, (segments, x.shape[dim] // segments))
    return apart


def _padded(x: Tensor, placement: Placement, length: int, size: int) -> Tensor:
    """A rank's part of a dimension of `length`, each segment as long as the first rank's."""
    dim, segments = placement.dim, placement.segments
    _, most = placement.share(length, size, 0)
    lacking = most - x.shape[dim] // segments
    if not lacking:
        return x
    apart = _apart(x, dim, segments)
    zeros = apart.new_zeros((*apart.shape[: dim + 1], lacking, *apart.shape[dim + 2 :]))
    return torch.cat((apart, zeros), dim + 1).flatten(dim, dim + 1)


def _trimmed(x: Tensor, placement: Placement, length: int, size: int, index: int) -> Tensor:
    """What `_padded` made longer on rank `index`, as it was."""
    start, stop = placement.share(length, size, index)
    dim, segments = placement.dim, placement.segments
    if x.shape[dim] == segments * (stop - start):
        return x
    return _apart(x, dim, segments).narrow(dim + 1, 0, stop - start).flatten(dim, dim + 1)


def _identity(x: Tensor, transfer: Transfer) -> Finish:
    return lambda: x.view_as(x)


def _copy(x: Tensor, transfer: Transfer) -> Finish:
    """As `_identity`, but no view: as a leaf's `grad` autograd would add to it in place."""
    return lambda: x.clone()


def _divide(x: Tensor, transfer: Transfer) -> Finish:
    group = transfer.group
    if x.is_floating_point() or x.is_complex():
        return lambda: x / group.size
    return lambda: x.clone() if group.index == 0 else torch.zeros_like(x)


def _all_reduce(x: Tensor, transfer: Transfer) -> Finish:
    return transfer.group.start_all_reduce(x)


def _slice(x: Tensor, transfer: Transfer) -> Finish:
    # a copy, as in `_copy`; a view would keep all of `x` alive besides
    local = part(x, transfer.target, transfer.group.size, transfer.group.index)
    return lambda: local.clone(memory_format=torch.contiguous_format)


def _zeros(x: Tensor, transfer: Transfer) -> Finish:
    group, source, _, length = transfer

    def finish() -> Tensor:
        dim, segments = source.dim, source.segments
        full = x.new_zeros((*x.shape[:dim], length, *x.shape[dim + 1 :]))
        start, stop = source.share(length, group.size, group.index)
        own = _apart(full, dim, segments).narrow(dim + 1, start, stop - start)
        own.copy_(_apart(x, dim, segments))
        return full

    return finish


def _all_gather(x: Tensor, transfer: Transfer) -> Finish:
    group, source, _, length = transfer
    gather = group.start_all_gather(_padded(x, source, length, group.size))

    def finish() -> Tensor:
        gathered = gather()
        if source == shard(0) and source.even(length, group.size):
            return gathered.flatten(0, 1)  # a view
        parts = enumerate(gathered.unbind())
        return join([_trimmed(x, source, length, group.size, i) for i, x in parts], source)

    return finish


def _reduce_scatter(x: Tensor, transfer: Transfer) -> Finish:
    group, target = transfer.group, transfer.target
    x, size, length = x.detach(), group.size, x.shape[target.dim]
    if target.even(length, size):
        dim = target.dim
        parts = x.unflatten(dim, (target.segments, size, -1)).movedim(dim + 1, 0)
        scatter = group.start_reduce_scatter(parts)
        return lambda: scatter().flatten(dim, dim + 1)
    uneven = (_padded(part(x, target, size, i), target, length, size) for i in range(size))
    scatter = group.start_reduce_scatter(torch.stack(tuple(uneven)))
    return lambda: _trimmed(scatter(), target, length, size, group.index)


def _all_to_all(x: Tensor, transfer: Transfer) -> Finish:
    group, source, target, length = transfer
    x = x.detach()
    if source.dim != target.dim:
        parts = [part(x, target, group.size, i) for i in range(group.size)]
        shape = list(parts[group.index].shape)
        shape[source.dim] = length
        shapes = [source.local_shape(tuple(shape), group.size, i) for i in range(group.size)]
        sent = group.start_all_to_all(parts, shapes, _largest(x, source, length, group.size))
        return lambda: join(sent(), source)
    dim = source.dim
    outward, inward = _crossings(length, source, target, group.size, group.index)
    sends = [x.index_select(dim, i.to(x.device)) for i in outward]
    shapes = [(*x.shape[:dim], len(i), *x.shape[dim + 1 :]) for i in inward]
    sent = group.start_all_to_all(sends, shapes, _largest(x, source, length, group.size))
    place = torch.cat(inward)
    shape = [*x.shape[:dim], len(place), *x.shape[dim + 1 :]]
    return lambda: x.new_empty(shape).index_copy_(dim, place.to(x.device), torch.cat(sent(), dim))


def _largest(x: Tensor, source: Placement, length: int, size: int) -> int:
    shape = (*x.shape[: source.dim], length, *x.shape[source.dim + 1 :])
    return prod(source.local_shape(shape, size)) * x.element_size()


@lru_cache(maxsize=256)
def _crossings(
    length: int, source: Placement, target: Placement, size: int, index: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Between two shardings of a dimension: positions to send to, and to fill from, each rank."""
    entries = torch.arange(length)
    there = [part(entries, source.at(0), size, i) for i in range(size)]
    wanted = [part(entries, target.at(0), size, i) for i in range(size)]
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
    def forward(ctx: Any, x: Tensor, there: Transfer, back: Transfer) -> Tensor:
        ctx.back = back
        return TABLE[there.source.kind, there.target.kind][0](x, there)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = ctx.back
        return TABLE[back.target.kind, back.source.kind][1](gradient, back)(), None, None


def depart(
    x: Tensor, group: Communicator, source: Placement, target: Placement, length: int = 0
) -> Finish:
    """Begins the move of `x` on the ranks of `group`; the function that ends it. length: entries
    of the dimension that `source` shards; 0: each rank has as many as this one. Where `x` needs no
    gradient nothing is sent in backward; integers are moved forward alone."""
    if source == target or group.size == 1:
        return lambda: x
    forward, backward = TABLE[source.kind, target.kind]
    length = length or (x.shape[source.dim] * group.size if source.sharded else 0)
    there = Transfer(group, source, target, length)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (lambda: x) if forward is _identity else forward(x, there)
    wide = 0
    if target.sharded:
        wide = length if source.sharded and source.dim == target.dim else x.shape[target.dim]
    back = Transfer(group, target, source, wide)
    if forward in QUIET and backward in QUIET:
        return lambda: _Move.apply(x, there, back)
    return async_move(x, lambda value: forward(value, there), lambda dy: backward(dy, back))


def move(
    x: Tensor, group: Communicator, source: Placement, target: Placement, length: int = 0
) -> Tensor:
    return depart(x, group, source, target, length)()


class GroupAxis:
    """The tensor axis of one layout over a group; implements `trace.rules.axis.TensorAxis`."""

    def __init__(self, group: Communicator, streams: RandomStreams, norm: BatchNormPolicy) -> None:
        self.group, self.streams, self.norm = group, streams, norm
        self.size, self.index = group.size, group.index
        self.real_rows = 1  # of the block being computed; 0: what is computed is a stand-in
        self.divided: DividedBackward | None = None  # where divided graphs leave what is later

    def move(self, x: Tensor, source: str, target: str, length: int = 0) -> Tensor:
        return move(x, self.group, parse(source), parse(target), length)

    def moving(
        self, x: Tensor, source: str, target: str, length: int = 0
    ) -> Generator[None, None, Tensor]:
        """`move` that pauses once between departure and arrival."""
        arrive = depart(x, self.group, parse(source), parse(target), length)
        yield
        return arrive()

    def maximum(self, x: Tensor) -> Tensor:
        largest = x.detach().clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(largest, "max")
        return largest

    def stream(self, key: int, sharded: bool, rows: bool) -> None:
        self.streams.seed(key, sharded, rows)

    def product(self, name: str, *given: Any) -> Tensor:
        assert self.divided is not None
        return self.divided.product(name, *given)

    def joined(self, weight: Tensor) -> Tensor:
        assert self.divided is not None
        return self.divided.joined(weight)

    def batch_norm(self, *arguments: Any) -> Tensor:
        return self.norm.apply(NormArguments(*arguments), real=self.real_rows > 0)
