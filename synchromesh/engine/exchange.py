"""An exchange: a value that one component makes in one layout and another reads in another.

Both layouts cover the ranks of one stage. Forward converts the value, backward the gradient, by
the same function with the sides exchanged. What a placement means for the two:

                R             r             P             S
    value       replicated    replicated    partial       sharded
    gradient    replicated    partial       replicated    sharded

A rank whose row range is empty computes one stand-in row: it receives some row, and sends none.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.engine.async_move import journey
from synchromesh.engine.collectives import move
from synchromesh.engine.communicator import Finish
from synchromesh.engine.routes import Ranges, Route, Side, Slices, nested, routes
from synchromesh.engine.stage import Stage
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement

_VALUE = {"R": REPLICATED, "r": REPLICATED, "P": PARTIAL}
_GRADIENT = {"R": REPLICATED, "r": PARTIAL, "P": REPLICATED}


@dataclass(frozen=True)
class _Crossing:
    """An exchange of one value: both sides, for the value and for its gradient."""

    stage: Stage
    rows: Rows
    source: Side
    target: Side
    gradient_source: Side  # the reader's side
    gradient_target: Side


def exchange(*arguments: Any) -> Tensor:
    """`depart` and arrival at once."""
    return depart(*arguments)()


def depart(
    x: Tensor,
    value: Value,
    have: Placement,
    want: Placement,
    source: Layout,
    target: Layout,
    stage: Stage,
    rows_source: Ranges,
    rows_target: Ranges,
) -> Finish:
    """Sends `x`, this rank's part of `value` under (source, have), to be its part under (target,
    want).

    The function that waits for what arrives here and returns it.

    rows_source, rows_target: the global rows of each data index. Local tensors have at least one
    row, the stand-in of a rank without rows. Every rank of the stage calls, in equal order.
    """
    assert source.devices == target.devices, f"{source} and {target} are of one stage"
    if value.rows is None:
        return lambda: _rowless(x, have, want, source, target, stage)
    ours, theirs = _first(have, value.rows), _first(want, value.rows)
    made = Side(source.tensor, rows_source, ours)
    read = Side(target.tensor, rows_target, theirs)
    crossing = _Crossing(
        stage,
        value.rows,
        replace(made, placement=_VALUE.get(have.kind, ours)),
        replace(read, placement=_VALUE.get(want.kind, theirs)),
        replace(read, placement=_GRADIENT.get(want.kind, theirs)),
        replace(made, placement=_GRADIENT.get(have.kind, ours)),
    )
    if x.requires_grad and torch.is_grad_enabled():
        return journey(
            x,
            lambda value: _convert(value, crossing.source, crossing.target, crossing, False),
            lambda gradient: _convert(
                gradient, crossing.gradient_source, crossing.gradient_target, crossing, True
            ),
        )
    return _convert(x.detach(), crossing.source, crossing.target, crossing, gradient=False)


def _first(placement: Placement, rows: Rows) -> Placement:
    """`placement` with its dimension counted in the value with rows first (see `_rows_first`)."""
    if not placement.sharded:
        return placement
    assert placement.dim != rows.dim, f"{placement} shards the dimension of the batch rows"
    shift = 1 if placement.dim < rows.dim else 2
    return Placement("S", placement.dim + shift, placement.segments)


def _rows_first(x: Tensor, rows: Rows, count: int) -> Tensor:
    """(..., segments x rows x inner, ...) -> (rows, ..., segments, inner, ...), a view."""
    d = rows.dim
    assert x.shape[d] == rows.segments * count * rows.inner, (
        f"{tuple(x.shape)} does not have {count} rows as {rows}"
    )
    apart: Tensor = x.unflatten(d, (rows.segments, count, rows.inner))
    return apart.movedim(d + 1, 0)


def _rows_back(x: Tensor, rows: Rows) -> Tensor:
    return x.movedim(0, rows.dim + 1).flatten(rows.dim, rows.dim + 2)


def _convert(x: Tensor, source: Side, target: Side, way: _Crossing, gradient: bool) -> Finish:
    position = way.stage.position
    assert position is not None, "an idle rank exchanges nothing"
    local = _rows_first(x, way.rows, max(1, source.rows_at(position)))
    received = _redistribute(local, source, target, way.stage, position)

    def finish() -> Tensor:
        arrived = received()
        if not target.rows_at(position):  # the others needed this rank's rows, it needs none
            row = local[:1]
            arrived = _stand_in(torch.zeros_like(row) if gradient else row, source, target)
        return _rows_back(arrived, way.rows).contiguous()

    return finish


def _stand_in(row: Tensor, source: Side, target: Side) -> Tensor:
    """A row of the target's local shape with ordinary numbers: zeros might divide by zero."""
    if source.placement.sharded:
        row = torch.cat([row] * source.tensor, source.placement.dim)
    if target.placement.sharded:
        dim = target.placement.dim
        row = row.narrow(dim, 0, row.shape[dim] // target.tensor)
    return row


def _redistribute(x: Tensor, source: Side, target: Side, stage: Stage, position: int) -> Finish:
    """`x` (rows first) to the other side: a collective where one fits, else routes."""
    kinds = source.placement.kind, target.placement.kind
    mine, theirs = _layout(source), _layout(target)
    if kinds == ("R", "R") and target.tensor > source.tensor and nested(source, target):
        if source.tensor == 1:
            gather = stage.tensor_group(theirs).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
        if len(target.rows) == 1:
            gather = stage.data_group(mine).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
    if kinds == ("P", "R"):
        together = stage.tensor_group(mine)
        if nested(target, source) and target.rows_at(position) % target.tensor == 0:
            parts = x.unflatten(0, (source.tensor, -1))
            scatter = together.start_reduce_scatter(parts)
            return lambda: stage.tensor_group(theirs).all_gather(scatter()).flatten(0, 1)
        if target.tensor > 1:  # sending every partial sum to every copy would be more
            x = x.detach().clone(memory_format=torch.contiguous_format)
            together.all_reduce(x)
            return _redistribute(x, replace(source, placement=REPLICATED), target, stage, position)
    return _route(x, source, target, stage, position)


def _layout(side: Side) -> Layout:
    return Layout(len(side.rows), side.tensor)


def _route(x: Tensor, source: Side, target: Side, stage: Stage, position: int) -> Finish:
    shape, dims = list(x.shape), {}
    if source.placement.sharded:
        shape[source.placement.dim] *= source.tensor
        dims[source.placement.dim] = shape[source.placement.dim]
    if target.placement.sharded:
        dims[target.placement.dim] = shape[target.placement.dim]
        assert shape[target.placement.dim] % (target.tensor * target.placement.segments) == 0
        shape[target.placement.dim] //= target.tensor
    shape[0] = target.rows_at(position)
    cut = (0, *sorted(dims))
    all_routes = routes(source, target, tuple(sorted(dims.items())))
    outward = [r for r in all_routes if r.sender == position != r.receiver]
    inward = [r for r in all_routes if r.receiver == position]
    others = [r for r in inward if r.sender != position]
    if not outward and not others and len(inward) == 1 and len(inward[0].pieces) == 1:
        ((at, to),) = inward[0].pieces
        if _lengths(shape, cut, to) == shape:  # a part of what is here already
            return lambda: _piece(x, cut, at)
    sends = [
        (r.receiver, torch.cat([_piece(x, cut, at).reshape(-1) for at, _ in r.pieces]))
        for r in outward
    ]
    buffers = [
        x.new_empty(sum(prod(_lengths(shape, cut, to)) for _, to in r.pieces)) for r in others
    ]
    wait = stage.whole.start_exchange(
        sends, [(r.sender, b) for r, b in zip(others, buffers, strict=True)]
    )

    def finish() -> Tensor:
        wait()
        return _assemble(x, shape, cut, source, target, position, inward, others, buffers)

    return finish


def _assemble(
    x: Tensor,
    shape: list[int],
    cut: tuple[int, ...],
    source: Side,
    target: Side,
    position: int,
    inward: list[Route],
    others: list[Route],
    buffers: list[Tensor],
) -> Tensor:
    """The local tensor of the target side, of what was here and what came."""
    partial = "P" in (source.placement.kind, target.placement.kind)
    out = x.new_zeros(shape) if partial else x.new_empty(shape)  # else pieces fill all of it
    parts = [
        (to, _piece(x, cut, at)) for r in inward if r.sender == position for at, to in r.pieces
    ]
    for r, buffer in zip(others, buffers, strict=True):
        start = 0
        for _, to in r.pieces:
            lengths = _lengths(shape, cut, to)
            parts.append((to, buffer[start : start + prod(lengths)].view(lengths)))
            start += prod(lengths)
    for to, part in parts:
        place = _piece(out, cut, to)
        if partial:
            place.add_(part)
        else:
            place.copy_(part)
    return out


def _lengths(shape: list[int], dims: tuple[int, ...], slices: Slices) -> list[int]:
    """The shape of a piece of a tensor of `shape`."""
    cut = {dim: length for dim, (_, length) in zip(dims, slices, strict=True)}
    return [cut.get(d, length) for d, length in enumerate(shape)]


def _piece(x: Tensor, dims: tuple[int, ...], slices: Slices) -> Tensor:
    for dim, (first, length) in zip(dims, slices, strict=True):
        x = x.narrow(dim, first, length)
    return x


def _rowless(
    x: Tensor, have: Placement, want: Placement, source: Layout, target: Layout, stage: Stage
) -> Tensor:
    """A value without batch rows is equal on all data ranks already; its gradients are not."""
    if have.kind not in "Rr":
        x, have = move(x, stage.tensor_group(source), have, REPLICATED), REPLICATED
    held = want if want.kind in "Rr" else REPLICATED
    if x.requires_grad and torch.is_grad_enabled():
        x = _Rowless.apply(x, have.kind, held.kind, source, target, stage)
    return move(x, stage.tensor_group(target), held, want)


class _Rowless(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, have: str, want: str, source: Layout, target: Layout, stage: Stage
    ) -> Tensor:
        ctx.way = have, want, source, target, stage
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        have, want, source, target, stage = ctx.way
        # each reader's rank gets its share, so that the sum over all ranks is the gradient
        dx = dy / target.tensor if want == "R" else dy.clone()
        if have == "R":
            dx = dx.contiguous()
            stage.tensor_group(source).all_reduce(dx)
        return dx, None, None, None, None, None
