"""A change of sides with tensors: what a rank sends, and how it puts together what it receives.

Tensors are rows first: (rows, ..., segments, inner, ...). The routes (values/routes.py) say which
boxes go from whom to whom; a rank on both sides keeps its own."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from synchromesh.values.component import Rows
from synchromesh.values.routes import Change, Slices

Message = tuple[int, Tensor]  # to or from a position


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
    return _box(x, change.cut, at)


def sends(change: Change, x: Tensor, position: int) -> list[Message]:
    """What a position of the source sends of `x`, flat, by receiver; views where they can be."""
    letters = []
    for r in change.routes:
        if r.sender == position != r.receiver:
            parts = [_box(x, change.cut, at).reshape(-1) for at, _ in r.parts]
            letters.append((r.receiver, parts[0] if len(parts) == 1 else torch.cat(parts)))
    return letters


def receives(change: Change, out: Tensor, position: int) -> list[Message]:
    """Tensors for what a position of the target receives for `out`, by sender; `out` itself where
    one sends all of it."""
    letters = []
    for r in change.routes:
        if r.receiver == position != r.sender:
            shapes = [change.lengths(out.shape, to) for _, to in r.parts]
            whole = shapes == [list(out.shape)] and not change.partial
            size = sum(map(prod, shapes))
            letters.append((r.sender, out.view(-1) if whole else out.new_empty(size)))
    return letters


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
            parts = [_box(x, change.cut, at) for at, _ in r.parts]
        else:
            shapes = [change.lengths(out.shape, to) for _, to in r.parts]
            flat = buffers[r.sender].split([prod(shape) for shape in shapes])
            parts = [f.view(shape) for f, shape in zip(flat, shapes, strict=True)]
        for (_, to), found in zip(r.parts, parts, strict=True):
            place = _box(out, change.cut, to)
            if place.data_ptr() == found.data_ptr() and place.numel():
                continue  # it was received there
            if change.partial:
                place.add_(found)
            else:
                place.copy_(found)
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
    """The inverse of `rows_first`, a view."""
    return x.movedim(0, rows.dim + 1).flatten(rows.dim, rows.dim + 2)


def _box(x: Tensor, dims: tuple[int, ...], slices: Slices) -> Tensor:
    for dim, (first, length) in zip(dims, slices, strict=True):
        x = x.narrow(dim, first, length)
    return x
