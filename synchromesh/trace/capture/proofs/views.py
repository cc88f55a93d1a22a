"""Proofs of operators that only rearrange entries.

Views keep the flat row-major order, in which a value with rows is so many blocks of rows as the
sizes ahead of the rows and the segments multiply to; what belongs to a row in a block lies side by
side. A view keeps that number: rows lie regularly in it where the sizes ahead of them divide it.

Operators along a dimension take entries apart, or put them together. Where that is not the
dimension of the rows they lie as before, else row identities show it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from synchromesh.trace.nodes import by_operator, dims_of

from ..row_layout import Case, IrregularRows, RowLayout, flat_size
from .trial import evaluated


def flat(case: Case) -> RowLayout:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    if case.overload == "dtype":  # another type changes the size of the last dimension
        if case.first.layout.dim == case.first.rank - 1:
            raise case.unproved()
        return case.shared_layout()
    if case.first.rows is None:
        raise case.positional()
    source, result = case.first.layout, case.result
    if any(e == 0 for e in case.sizes):
        return result.in_any_order
    outside = flat_size(case.first.sizes[: source.dim])
    ahead = flat_size(case.sizes[: result.dim])
    proved = set()
    for segments in source.segments:
        here, rest = divmod(outside * segments, ahead)
        if rest == 0 and result.count % here == 0:
            proved.add(here)
    if not proved:
        raise case.unproved()
    return result.with_segments(proved)


def expanded(case: Case) -> RowLayout:
    """What is expanded along the rows is the same for all of them."""
    source = case.first
    if source.rows is None:
        return case.result.in_any_order
    layout = source.layout
    if layout.dim + case.rank - source.rank != case.result.dim:
        raise case.unproved()
    return case.shared_layout([source])


def diagonal(case: Case) -> RowLayout:
    """diagonal, diag_embed: all dimensions but the two that are taken together."""
    source = case.first
    rank = source.rank if case.name == "diagonal" else case.rank
    dims = dims_of([case.constant("dim1"), case.constant("dim2")], rank)
    at = source.layout.dim if case.name == "diagonal" else case.result.dim
    if at in dims:
        raise case.positional()
    return case.shared_layout()


NOTHING = torch.empty(0, dtype=torch.int64)


def on_identities(case: Case) -> Callable[[dict[int, Tensor], int], Any]:
    """Runs the operator itself, on identities in place of tensors and a few rows."""
    return lambda given, rows: case.apply(lambda o: given.get(id(o), NOTHING), rows)


def joined(case: Case) -> RowLayout:
    """cat, stack, flip, roll: row identities show it. Empty caches add nothing."""
    operands = [e for e in case.operands if 0 not in e.sizes]
    if not operands or any(e.rows is None for e in operands):
        raise case.coupled(case.result.dim)
    return evaluated(case, on_identities(case), operands, partial(disorder, case))


def disorder(case: Case) -> IrregularRows:
    """Along the rows the operator brings them out of order, along others it disagrees."""
    layouts = [e.layout for e in case.with_rows]
    shared = case.result.in_any_order.segments.intersection(*(x.segments for x in layouts))
    if len(layouts) > 1 and not shared and all(x.count == case.result.count for x in layouts):
        return case.different_orders()
    return case.coupled(layouts[0].dim if layouts else case.result.dim)


def cut(case: Case) -> RowLayout:
    """chunk, split, slice and the like: part of one dimension."""
    source = case.first
    if source.rows is None:
        raise case.positional()
    dim = dims_of(case.constant("dim", 0), source.rank)[0]
    if source.layout.dim != dim:
        return case.shared_layout([source])
    return joined(case)


def moved(case: Case) -> RowLayout:
    """flip, roll, rot90."""
    if case.name == "roll" and not case.constant("dims") and case.first.rank > 1:
        raise case.coupled(case.first.layout.dim)  # along all dimensions at once
    return joined(case)


def repeated(case: Case) -> RowLayout:
    """repeat, tile, repeat_interleave. What had no rows is the same for all that it becomes."""
    source = case.first
    if case.name == "repeat_interleave":
        if case.overload != "self_int" and len(case.operands) < 2:
            raise case.positional()  # numbers from counts
        if case.constant("dim") is None and source.rank > 1:
            raise case.unproved()
        dim = dims_of(case.constant("dim") or 0, source.rank)[0]
        if source.rows is not None and source.layout.dim != dim:
            return case.shared_layout([source])
    if len(case.operands) > 1:
        raise case.coupled(case.result.dim)
    return joined(case) if source.rows is not None else spread(case)


def spread(case: Case) -> RowLayout:
    """The layout of entries without rows that are repeated for all rows."""
    source, result, run = case.first, case.result, on_identities(case)
    dim = result.dim - case.rank + source.rank
    size = int(source.sizes[dim]) if dim >= 0 else 1
    content = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(source.rank)])
    proved = set(result.in_any_order.segments)
    for rows in (2, 3):
        made: Tensor = run({id(source): content}, rows)
        line = made.movedim(result.dim, -1).reshape(-1, result.count * rows)[0]
        for segments in set(proved):
            apart = line.unflatten(0, (segments, rows, result.count // segments))
            if not bool((apart == apart[:, :1]).all()):
                proved.discard(segments)
    if not proved:
        raise case.unproved()
    return result.with_segments(proved)


def put_back(case: Case) -> RowLayout:
    """select_scatter, slice_scatter: a part of one dimension is replaced."""
    tensor, part = case.operands[:2]
    dim = dims_of(case.constant("dim", 0), tensor.rank)[0]
    if case.result.dim == dim:
        raise case.coupled(dim)
    removed = case.name == "select_scatter" and dim < case.result.dim
    for operand, at in ((tensor, case.result.dim), (part, case.result.dim - removed)):
        if operand.rows is not None and operand.layout.dim != at:
            raise case.unproved()
    return case.shared_layout([e for e in (tensor, part) if e.rows is not None])


ALONG: dict[str, Callable[[Case], RowLayout]] = by_operator({
    joined: (
        "cat concat concatenate stack hstack vstack dstack row_stack column_stack hsplit vsplit "
        "dsplit"
    ),
    cut: (
        "chunk unsafe_chunk split unsafe_split split_with_sizes tensor_split "
        "unsafe_split_with_sizes split_copy split_with_sizes_copy unbind unbind_copy slice "
        "slice_copy select select_copy narrow narrow_copy"
    ),
    moved: "flip fliplr flipud roll rot90",
    repeated: "repeat tile repeat_interleave",
    put_back: "select_scatter slice_scatter",
})  # fmt: skip
PROOFS: dict[str, Callable[[Case], RowLayout]] = ALONG | by_operator({
    flat: (
        "view reshape _unsafe_view flatten unflatten view_copy view_as reshape_as ravel squeeze "
        "squeeze_copy unsqueeze unsqueeze_copy atleast_1d atleast_2d atleast_3d _reshape_alias"
    ),
    Case.shared_layout: (  # a dimension keeps its entries in their order
        "permute permute_copy transpose transpose_copy t t_copy swapaxes swapdims movedim "
        "moveaxis numpy_T mT mH matrix_H adjoint"
    ),
    expanded: "expand expand_copy expand_as broadcast_to",
    diagonal: "diagonal diag_embed",
})  # fmt: skip
