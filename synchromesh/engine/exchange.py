"""An exchange: a value that one component makes in one layout and another reads in another.

Both layouts cover the ranks of one stage. Forward converts the value, backward the gradient, by
the same function with the sides exchanged. What a placement means for the two:

                R             r             P             S
    value       replicated    replicated    partial       sharded
    gradient    replicated    partial       replicated    sharded

A rank whose row range is empty computes one stand-in row: it receives some row, and sends none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.engine.async_move import async_move
from synchromesh.engine.collectives import move
from synchromesh.engine.communicator import Finish
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.routes import Ranges, Side, Slices, nested, routes
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement

Border = tuple[str, int, Placement]  # a value by name, tensor degree, placement
_VALUE = {"R": REPLICATED, "r": REPLICATED, "P": PARTIAL}
_GRADIENT = {"R": REPLICATED, "r": PARTIAL, "P": REPLICATED}


@dataclass(frozen=True)
class Exchange:
    """A value that one component makes as (source, have) and another reads as (target, want)."""

    value: Value
    have: Placement
    want: Placement
    source: Layout
    target: Layout

    @cached_property
    def made(self) -> Border:
        """The form in which it is there."""
        return self.value.name, self.source.tensor, self.have

    @cached_property
    def read(self) -> Border:
        """The form in which it is wanted."""
        return self.value.name, self.target.tensor, self.want


@dataclass(frozen=True)
class _Conversion:
    """One direction of an exchange: a value, or its gradient, from one side to the other."""

    groups: PlanGroups
    rows: Rows
    source: Side
    target: Side
    gradient: bool = False


def depart(
    x: Tensor, item: Exchange, groups: PlanGroups, ranges: Callable[[int], Ranges]
) -> Finish:
    """Sends `x`, this rank's part of a value, to be its part on the other side of `item`.

    The function that waits for what arrives here and returns it. ranges: the global rows of each
    data index, by data degree. Local tensors have at least one row, the stand-in of a rank without
    rows. Every rank of the stage calls, in equal order.
    """
    source, target, rows = item.source, item.target, item.value.rows
    assert source.devices == target.devices, f"{source} and {target} are of one stage"
    if rows is None:
        return lambda: _rowless(x, item, groups)
    have, want = _first(item.have, rows), _first(item.want, rows)

    def side(layout: Layout, placement: Placement, kinds: dict[str, Placement]) -> Side:
        shape = _shape_rows_first(item.value)
        width = shape[placement.dim] if placement.sharded else 0
        kind = kinds.get(placement.kind, placement)
        return Side(layout.tensor, ranges(layout.data), kind, width)

    forward = _Conversion(groups, rows, side(source, have, _VALUE), side(target, want, _VALUE))
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _convert(x.detach(), forward)
    backward = _Conversion(
        groups, rows, side(target, want, _GRADIENT), side(source, have, _GRADIENT), gradient=True
    )
    return async_move(
        x, lambda value: _convert(value, forward), lambda gradient: _convert(gradient, backward)
    )


def _first(placement: Placement, rows: Rows) -> Placement:
    """`placement` with its dimension counted in the value with rows first (see `_rows_first`)."""
    if not placement.sharded:
        return placement
    assert placement.dim != rows.dim, f"{placement} shards the dimension of the batch rows"
    shift = 1 if placement.dim < rows.dim else 2
    return placement.at(placement.dim + shift)


def _shape_rows_first(value: Value) -> tuple[int, ...]:
    """The shape of one row of `value` as `_rows_first` has it."""
    rows, shape = value.rows, value.shape
    assert rows is not None, f"{value.name} has no rows"
    return (1, *shape[: rows.dim], rows.segments, rows.inner, *shape[rows.dim + 1 :])


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


def _convert(x: Tensor, way: _Conversion) -> Finish:
    source, target, position = way.source, way.target, way.groups.position
    assert position is not None, "an idle rank exchanges nothing"
    local = _rows_first(x, way.rows, max(1, source.rows_at(position)))
    received = _redistribute(local, source, target, way.groups, position)

    def finish() -> Tensor:
        arrived = received()
        if not target.rows_at(position):  # the others needed this rank's rows, it needs none
            row = local[:1]
            row = torch.zeros_like(row) if way.gradient else row
            arrived = _stand_in(row, source, target, position)
        return _rows_back(arrived, way.rows).contiguous()

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


def _redistribute(
    x: Tensor, source: Side, target: Side, groups: PlanGroups, position: int
) -> Finish:
    """`x` (rows first) to the other side: a collective where one fits, else routes."""
    kinds = source.placement.kind, target.placement.kind
    made, read = _layout(source), _layout(target)
    if kinds == ("R", "R") and target.tensor > source.tensor and nested(source, target):
        if source.tensor == 1:
            gather = groups.tensor_group(read).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
        if len(target.rows) == 1:
            gather = groups.data_group(made).start_all_gather(x)
            return lambda: gather().flatten(0, 1)
    if kinds == ("P", "R"):
        together = groups.tensor_group(made)
        if nested(target, source) and target.rows_at(position) % target.tensor == 0:
            parts = x.unflatten(0, (source.tensor, -1))
            scatter = together.start_reduce_scatter(parts)
            return lambda: groups.tensor_group(read).all_gather(scatter()).flatten(0, 1)
        if target.tensor > 1:  # sending every partial sum to every copy would be more
            x = x.detach().clone(memory_format=torch.contiguous_format)
            together.all_reduce(x)
            return _redistribute(
                x, replace(source, placement=REPLICATED), target, groups, position
            )
    return _route(x, source, target, groups, position)


def _layout(side: Side) -> Layout:
    return Layout(len(side.rows), side.tensor)


def _route(x: Tensor, source: Side, target: Side, groups: PlanGroups, position: int) -> Finish:
    shape, dims = list(x.shape), {}
    if source.placement.sharded:
        shape[source.placement.dim] = dims[source.placement.dim] = source.width
    if target.placement.sharded:
        dims[target.placement.dim] = target.width
        shape[target.placement.dim] = target.width_at(position)
    shape[0] = target.rows_at(position)
    cut = (0, *sorted(dims))
    all_routes = routes(source, target, tuple(sorted(dims.items())))
    outward = [r for r in all_routes if r.sender == position != r.receiver]
    inward = [r for r in all_routes if r.receiver == position]
    others = [r for r in inward if r.sender != position]
    if not outward and not others and len(inward) == 1 and len(inward[0].parts) == 1:
        ((at, to),) = inward[0].parts
        if _lengths(shape, cut, to) == shape:  # a part of what is here already
            return lambda: _box(x, cut, at)
    sends = [
        (r.receiver, torch.cat([_box(x, cut, at).reshape(-1) for at, _ in r.parts]))
        for r in outward
    ]
    buffers = [
        x.new_empty(sum(prod(_lengths(shape, cut, to)) for _, to in r.parts)) for r in others
    ]
    wait = groups.everyone.start_exchange(
        sends, [(r.sender, b) for r, b in zip(others, buffers, strict=True)]
    )

    def finish() -> Tensor:
        wait()
        own = [r for r in inward if r.sender == position]
        parts = [(to, _box(x, cut, at)) for r in own for at, to in r.parts]
        for r, buffer in zip(others, buffers, strict=True):
            shapes = [_lengths(shape, cut, to) for _, to in r.parts]
            arrived = buffer.split([prod(lengths) for lengths in shapes])
            for (_, to), part, lengths in zip(r.parts, arrived, shapes, strict=True):
                parts.append((to, part.view(lengths)))
        partial = "P" in (source.placement.kind, target.placement.kind)
        out = x.new_zeros(shape) if partial else x.new_empty(shape)  # else parts fill all of it
        return _assembled(out, cut, parts, partial)

    return finish


def _assembled(
    out: Tensor, cut: tuple[int, ...], parts: list[tuple[Slices, Tensor]], partial: bool
) -> Tensor:
    """`out`, filled with parts, or their sum where they are partial."""
    for to, part in parts:
        place = _box(out, cut, to)
        if partial:
            place.add_(part)
        else:
            place.copy_(part)
    return out


def _lengths(shape: list[int], dims: tuple[int, ...], slices: Slices) -> list[int]:
    """The shape of a part of a tensor of `shape`."""
    cut = {dim: length for dim, (_, length) in zip(dims, slices, strict=True)}
    return [cut.get(d, length) for d, length in enumerate(shape)]


def _box(x: Tensor, dims: tuple[int, ...], slices: Slices) -> Tensor:
    for dim, (first, length) in zip(dims, slices, strict=True):
        x = x.narrow(dim, first, length)
    return x


def _rowless(x: Tensor, item: Exchange, groups: PlanGroups) -> Tensor:
    """A value without batch rows is equal on all data ranks already; its gradients are not."""
    have, want, source, target = item.have, item.want, item.source, item.target
    if have.kind not in "Rr":
        length = item.value.shape[have.dim] if have.sharded else 0
        x = move(x, groups.tensor_group(source), have, REPLICATED, length)
        have = REPLICATED
    between = want if want.kind in "Rr" else REPLICATED
    if x.requires_grad and torch.is_grad_enabled():
        x = _Rowless.apply(x, have.kind, between.kind, source, target, groups)
    return move(x, groups.tensor_group(target), between, want)


class _Rowless(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        have: str,
        want: str,
        source: Layout,
        target: Layout,
        groups: PlanGroups,
    ) -> Tensor:
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
