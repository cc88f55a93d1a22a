"""Proofs of operators that take entries apart, or put them together, along a dimension.

Where that is not the dimension of the rows they lie as before, else row identities tell.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

from ..lay import Case, Irregular, Lay, dims_of, is_number, number
from .identities import evaluated

Node = torch.fx.Node
NOTHING = torch.empty(0, dtype=torch.int64)


def alone(case: Case) -> Callable[[dict[int, Tensor], int], Any]:
    """Runs the operator itself, on identities in place of tensors and a few rows."""
    target: Any = case.node.target

    def run(given: dict[int, Tensor], rows: int) -> Any:
        entries = iter(case.entries)

        def put(n: Node) -> Any:
            return number(n, rows) if is_number(n) else given.get(id(next(entries)), NOTHING)

        return target(*map_arg(case.node.args, put), **map_arg(dict(case.node.kwargs), put))

    return run


def joined(case: Case) -> Lay:
    """cat, stack and the like, flip and roll: row identities tell, whatever the dimension.

    Tensors without entries, as empty caches are, add nothing.
    """
    entries = [e for e in case.entries if 0 not in e.sizes]
    if not entries or any(e.fate is None for e in entries):
        raise case.mixed(case.place.dim)
    found = evaluated(case, alone(case), entries)
    if found is None:
        raise disorder(case)
    return found


def disorder(case: Case) -> Irregular:
    """Along the rows the operator brings them out of order, along others it disagrees."""
    lays = [e.lay for e in case.rowed]
    apart = case.place.any.segments.intersection(*(lay.segments for lay in lays))
    if len(lays) > 1 and not apart and all(lay.count == case.place.count for lay in lays):
        return Irregular(f"joins rows that lie in different orders ({case.where})")
    return case.mixed(lays[0].dim if lays else case.place.dim)


def cut(case: Case) -> Lay:
    """chunk, split, slice and the like: part of one dimension."""
    source = case.main
    if source.fate is None:
        raise case.positional()
    dim = dims_of(case.constant("dim", 0), source.rank)[0]
    if source.lay.dim != dim:
        return case.kept([source])
    return joined(case)


def moved(case: Case) -> Lay:
    """flip, roll, rot90."""
    if case.name == "roll" and not case.constant("dims") and case.main.rank > 1:
        raise case.mixed(case.main.lay.dim)  # along all dimensions at once
    return joined(case)


def repeated(case: Case) -> Lay:
    """repeat, tile, repeat_interleave. What had no rows is the same for all that it becomes."""
    source, place = case.main, case.place
    if case.name == "repeat_interleave":
        if case.overload != "self_int" and len(case.entries) < 2:
            raise case.positional()  # numbers from counts
        if case.constant("dim") is None and source.rank > 1:
            raise case.unproved()
        dim = dims_of(case.constant("dim") or 0, source.rank)[0]
        if source.fate is not None and source.lay.dim != dim:
            return case.kept([source])
    if len(case.entries) > 1:
        raise case.mixed(place.dim)
    return joined(case) if source.fate is not None else spread(case)


def spread(case: Case) -> Lay:
    """The lay of entries without rows that are repeated for all rows."""
    source, place, run = case.main, case.place, alone(case)
    dim = place.dim - case.rank + source.rank
    size = int(source.sizes[dim]) if dim >= 0 else 1
    content = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(source.rank)])
    ways = set(place.any.segments)
    for rows in (2, 3):
        found: Tensor = run({id(source): content}, rows)
        line = found.movedim(place.dim, -1).reshape(-1, place.count * rows)[0]
        for segments in set(ways):
            apart = line.unflatten(0, (segments, rows, place.count // segments))
            if not bool((apart == apart[:, :1]).all()):
                ways.discard(segments)
    if not ways:
        raise case.unproved()
    return place.as_(ways)


def put_back(case: Case) -> Lay:
    """select_scatter, slice_scatter: a part of one dimension is replaced."""
    whole, part = case.entries[:2]
    dim = dims_of(case.constant("dim", 0), whole.rank)[0]
    if case.place.dim == dim:
        raise case.mixed(dim)
    gone = case.name == "select_scatter" and dim < case.place.dim
    for entry, at in ((whole, case.place.dim), (part, case.place.dim - gone)):
        if entry.fate is not None and entry.lay.dim != at:
            raise case.unproved()
    return case.kept([e for e in (whole, part) if e.fate is not None])


PROOFS: dict[str, Callable[[Case], Lay]] = {
    **dict.fromkeys(
        (
            "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack",
            "column_stack",
        ),
        joined,
    ),
    **dict.fromkeys(
        (
            "chunk", "unsafe_chunk", "split", "unsafe_split", "split_with_sizes", "tensor_split",
            "unsafe_split_with_sizes", "split_copy", "split_with_sizes_copy", "unbind",
            "unbind_copy", "slice", "slice_copy", "select", "select_copy", "narrow",
            "narrow_copy",
        ),
        cut,
    ),
    **dict.fromkeys(("hsplit", "vsplit", "dsplit"), joined),
    **dict.fromkeys(("flip", "fliplr", "flipud", "roll", "rot90"), moved),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), repeated),
    **dict.fromkeys(("select_scatter", "slice_scatter"), put_back),
}  # fmt: skip
