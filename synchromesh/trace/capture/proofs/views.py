"""Proofs by arithmetic: operators that keep the flat row-major order, or exchange dimensions.

In flat order a value with rows is so many blocks of rows as the sizes ahead of the rows and the
segments multiply to; what belongs to a row in a block lies side by side. A view keeps that number,
so the rows lie regularly in it where the sizes ahead of them divide it.
"""

from collections.abc import Callable

from ..lay import Case, Lay, dims_of, flat_size


def flat(case: Case) -> Lay:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze."""
    if case.overload == "dtype":
        return retyped(case)
    if case.main.fate is None:
        raise case.positional()
    source, place = case.main.lay, case.place
    if any(e == 0 for e in case.sizes):
        return place.any
    outside = flat_size(case.main.sizes[: source.dim])
    ahead = flat_size(case.sizes[: place.dim])
    found = set()
    for segments in source.segments:
        here, rest = divmod(outside * segments, ahead)
        if rest == 0 and place.count % here == 0:
            found.add(here)
    if not found:
        raise case.unproved()
    return place.as_(found)


def retyped(case: Case) -> Lay:
    """A view as another type changes the size of the last dimension."""
    if case.main.lay.dim == case.main.rank - 1:
        raise case.unproved()
    return case.kept()


def exchanged(case: Case) -> Lay:
    """permute, transpose and the like: a dimension keeps its entries in their order."""
    return case.kept()


def expanded(case: Case) -> Lay:
    """What is expanded along the rows is the same for all of them; other dimensions do not
    matter."""
    source = case.main
    if source.fate is None:
        return case.place.any
    lay = source.lay
    if lay.dim + case.rank - source.rank != case.place.dim:
        raise case.unproved()
    return case.kept([source])


def diagonal(case: Case) -> Lay:
    """diagonal, diag_embed: all dimensions but the two that are taken together."""
    source = case.main
    rank = source.rank if case.name == "diagonal" else case.rank
    dims = dims_of([case.constant("dim1"), case.constant("dim2")], rank)
    at = source.lay.dim if case.name == "diagonal" else case.place.dim
    if at in dims:
        raise case.positional()
    return case.kept()


PROOFS: dict[str, Callable[[Case], Lay]] = {
    **dict.fromkeys(
        (
            "view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "view_as",
            "reshape_as", "ravel", "squeeze", "squeeze_copy", "unsqueeze", "unsqueeze_copy",
            "atleast_1d", "atleast_2d", "atleast_3d", "_reshape_alias",
        ),
        flat,
    ),
    **dict.fromkeys(
        (
            "permute", "permute_copy", "transpose", "transpose_copy", "t", "t_copy", "swapaxes",
            "swapdims", "movedim", "moveaxis", "numpy_T", "mT", "mH", "matrix_H", "adjoint",
        ),
        exchanged,
    ),
    **dict.fromkeys(("expand", "expand_copy", "expand_as", "broadcast_to"), expanded),
    **dict.fromkeys(("diagonal", "diag_embed"), diagonal),
}  # fmt: skip
