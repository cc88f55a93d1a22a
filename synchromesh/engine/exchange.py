"""An exchange: a value that one component makes in one layout and another reads in another.

Here both layouts cover the ranks of one stage (engine/crossing.py: of two). Forward converts the
value, backward the gradient, by the same function with the sides exchanged. Placements mean:

                R             r             P             S
    value       replicated    replicated    partial       sharded
    gradient    replicated    partial       replicated    sharded

A rank whose row range is empty computes one stand-in row: it receives some row, and sends none.
Tensors that are cut are rows first: (rows, ..., segments, inner, ...)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.programs.collectives import async_move, move
from synchromesh.programs.communicator import Finish
from synchromesh.values.boxes import Slices
from synchromesh.values.component import Rows
from synchromesh.values.exchange import Change, Exchange, Ranges, Side, nested
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED

Message = tuple[int, Tensor]  # to or from a position


@dataclass(frozen=True)
class _Conversion:
    """One direction of an exchange: a value, or its gradient, from one side to the other."""

    groups: PlanGroups
    rows: Rows
    change: Change
    gradient: bool = False


def depart(
    x: Tensor, item: Exchange, groups: PlanGroups, ranges: Callable[[int], Ranges]
) -> Finish:
    """Sends `x`, this rank's part of a value, to be its part on the other side of `item`. The
    function that waits for what arrives here and returns it. ranges: the global rows of each data
    index, by data degree. Local tensors have at least one row, the stand-in of a rank without
    rows. Every rank of the stage calls, in equal order."""
    rows = item.value.rows
    assert not item.crosses, f"{item.source} and {item.target} are of one stage"
    if rows is None:
        return lambda: _rowless(x, item, groups)
    forward = _Conversion(groups, rows, item.change(ranges, gradient=False))
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _convert(x.detach(), forward)
    backward = _Conversion(groups, rows, item.change(ranges, gradient=True), gradient=True)
    return async_move(
        x, lambda value: _convert(value, forward), lambda gradient: _convert(gradient, backward)
    )


def _convert(x: Tensor, way: _Conversion) -> Finish:
    source, target, position = way.change.source, way.change.target, way.groups.position
    assert position is not None, "an idle rank exchanges nothing"
    local = rows_first(x, way.rows, max(1, source.rows_at(position)))
    received = _redistribute(local, source, target, way.groups, position)

    def finish() -> Tensor:
        arrived = received()
        if not target.rows_at(position):  # the others needed this rank's rows, it needs none
            row = local[:1]
            row = torch.zeros_like(row) if way.gradient else row
            arrived = _stand_in(row, source, target, position)
        return rows_back(arrived, way.rows).contiguous()

    return finish


def _stand_in(row: Tensor, source: Side, target: Side, position: int) -> Tensor:
    """A row of the target's local shape with ordinary numbers: zeros might divide by zero."""
    if source.placement.sharded:
        row = _resized(row, source.placement.dim, source.width)
    if target.placement.sharded:
        row = _resized(row, target.placement.dim, target.width_at(position))
    return row


def _resized(row: Tensor, dim: int, length: int) -> Tensor:
    """`row` with `length` entries along `dim`, its own over and over; ones if it has none."""
    if not row.shape[dim]:
        return row.new_ones((*row.shape[:dim], length, *row.shape[dim + 1 :]))
    return row.index_select(dim, torch.arange(length, device=row.device) % row.shape[dim])


def _redistribute(x: Tensor, source: Side, target: Side, groups: PlanGroups, at: int) -> Finish:
    """`x` (rows first) to the other side: a collective where one fits, else routes."""
    kinds = source.placement.kind, target.placement.kind
    made, read = source.layout, target.layout
    if kinds == ("R", "R") and target.tensor > source.tensor and nested(source, target):
        if source.tensor == 1:
            gather = groups.tensor_group(read).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
        if len(target.rows) == 1:
            gather = groups.data_group(made).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
    if kinds == ("P", "R"):
        together = groups.tensor_group(made)
        if nested(target, source) and target.rows_at(at) % target.tensor == 0:
            parts = x.unflatten(0, (source.tensor, -1))
            scatter = together.start_reduce_scatter(parts)
            return lambda: groups.tensor_group(read).all_gather(scatter()).flatten(0, 1)
        if target.tensor > 1:  # sending every partial sum to every copy would be more
            x = x.detach().clone(memory_format=torch.contiguous_format)
            together.all_reduce(x)
            return _redistribute(x, replace(source, placement=REPLICATED), target, groups, at)
    return _route(x, source, target, groups, at)


def _route(x: Tensor, source: Side, target: Side, groups: PlanGroups, position: int) -> Finish:
    change = Change(source, target)
    here = part(change, x, position)
    if here is not None:
        return lambda: here
    out = empty(change, x, change.shape(x.shape, position))
    inward = receives(change, out, position)
    wait = groups.everyone.start_exchange(sends(change, x, position), inward)

    def finish() -> Tensor:
        wait()
        return assembled(change, x, inward, out, position)

    return finish


def _rowless(x: Tensor, item: Exchange, groups: PlanGroups) -> Tensor:
    """A value without batch rows is equal on all data ranks already; its gradients are not."""
    have, want, source, target = item.have, item.want, item.source, item.target
    if have.kind not in "Rr":
        length = item.value.shape[have.dim] if have.sharded else 0
        x = move(x, groups.tensor_group(source), have, REPLICATED, length)
        have = REPLICATED
    between = want if want.kind in "Rr" else REPLICATED
    if x.requires_grad and torch.is_grad_enabled():
        x = _WithoutRows.apply(x, have.kind, between.kind, source, target, groups)
    return move(x, groups.tensor_group(target), between, want)


class _WithoutRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, have: str, want: str, source: Layout, target: Layout,
        groups: PlanGroups,
    ) -> Tensor:  # fmt: skip
        ctx.way = have, want, source, target, groups
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        have, want, source, target, groups = ctx.way
        # each reader's rank gets its share, so that the sum over all ranks is the gradient
        dx = dy / target.tensor if want == "R" else dy.clone()
        if have == "R":
            dx = dx.contiguous()
            groups.tensor_group(source).all_reduce(dx)
        return dx, None, None, None, None, None


# A change of sides with tensors: what a rank sends, and how it puts together what it receives


def part(change: Change, x: Tensor, position: int) -> Tensor | None:
    """A view of `x`, where that is all that comes to the position."""
    inward = [r for r in change.routes if r.receiver == position]
    outward = [r for r in change.routes if r.sender == position != r.receiver]
    if outward or len(inward) != 1 or inward[0].sender != position:
        return None
    (at, to), *more = inward[0].parts
    shape = change.shape(x.shape, position)
    if more or change.lengths(shape, to) != shape:
        return None
    return _cut_out(x, change.cut, at)


def sends(change: Change, x: Tensor, position: int) -> list[Message]:
    """What a position of the source sends of `x`, flat, by receiver; views where they can be."""
    messages = []
    for r in change.routes:
        if r.sender == position != r.receiver:
            parts = [_cut_out(x, change.cut, at).reshape(-1) for at, _ in r.parts]
            messages.append((r.receiver, parts[0] if len(parts) == 1 else torch.cat(parts)))
    return messages


def receives(change: Change, out: Tensor, position: int) -> list[Message]:
    """Tensors for what a position receives for `out`, by sender; `out` where one sends all."""
    messages = []
    for r in change.routes:
        if r.receiver == position != r.sender:
            shapes = [change.lengths(out.shape, to) for _, to in r.parts]
            whole = shapes == [list(out.shape)] and not change.partial
            size = sum(map(prod, shapes))
            messages.append((r.sender, out.view(-1) if whole else out.new_empty(size)))
    return messages


def assembled(
    change: Change, x: Tensor | None, received: Sequence[Message], out: Tensor, position: int
) -> Tensor:
    """`out`, filled with what has arrived and with what the position had itself (`x`)."""
    buffers = dict(received)
    for r in change.routes:
        if r.receiver != position:
            continue
        if r.sender == position:
            assert x is not None, "who receives from itself has something"
            parts = [_cut_out(x, change.cut, at) for at, _ in r.parts]
        else:
            shapes = [change.lengths(out.shape, to) for _, to in r.parts]
            flat = buffers[r.sender].split([prod(shape) for shape in shapes])
            parts = [x.view(shape) for x, shape in zip(flat, shapes, strict=True)]
        for (_, to), arrived in zip(r.parts, parts, strict=True):
            place = _cut_out(out, change.cut, to)
            if change.partial:
                place.add_(arrived)
            elif not place.numel() or place.data_ptr() != arrived.data_ptr():  # not received there
                place.copy_(arrived)
    return out


def empty(change: Change, like: Tensor, shape: Sequence[int]) -> Tensor:
    """What `assembled` fills: zeros where parts are added up."""
    return like.new_zeros(shape) if change.partial else like.new_empty(shape)


def rows_first(x: Tensor, rows: Rows, count: int) -> Tensor:
    """(..., segments x rows x inner, ...) -> (rows, ..., segments, inner, ...), a view."""
    d = rows.dim
    assert x.shape[d] == rows.segments * count * rows.inner, (
        f"{tuple(x.shape)} does not have {count} rows as {rows}"
    )
    apart: Tensor = x.unflatten(d, (rows.segments, count, rows.inner))
    return apart.movedim(d + 1, 0)


def rows_back(x: Tensor, rows: Rows) -> Tensor:
    return x.movedim(0, rows.dim + 1).flatten(rows.dim, rows.dim + 2)


def _cut_out(x: Tensor, dims: tuple[int, ...], slices: Slices) -> Tensor:
    for dim, (first, length) in zip(dims, slices, strict=True):
        x = x.narrow(dim, first, length)
    return x
