"""Proofs by arithmetic: operators that keep the flat row-major order, or exchange dimensions.

In flat order a value with rows is so many blocks of rows as the sizes ahead of the rows and the
segments multiply to; what belongs to a row in a block lies side by side. A view keeps that number,
so the rows lie regularly in it where the sizes ahead of them divide it."""

from collections.abc import Callable

from synchromesh.trace.nodes import by_operator, dims_of

from ..row_layout import Case, RowLayout, flat_size


def flat(case: Case) -> RowLayout:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    if case.overload == "dtype":
        return retyped(case)
    if case.first.rows is None:
        raise case.positional()
    source, result = case.first.layout, case.result
    if any(e == 0 for e in case.sizes):
        return result.in_any_order
    outside = flat_size(case.first.sizes[: source.dim])
    ahead = flat_size(case.sizes[: result.dim])
    found = set()
    for segments in source.segments:
        here, rest = divmod(outside * segments, ahead)
        if rest == 0 and result.count % here == 0:
            found.add(here)
    if not found:
        raise case.unproved()
    return result.with_segments(found)


def retyped(case: Case) -> RowLayout:
    """A view as another type changes the size of the last dimension."""
    if case.first.layout.dim == case.first.rank - 1:
        raise case.unproved()
    return case.shared_layout()


def expanded(case: Case) -> RowLayout:
    """What is expanded along the rows is the same for all of them; other dimensions do not
    matter."""
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


PROOFS: dict[str, Callable[[Case], RowLayout]] = by_operator({
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
