"""Rules for operators that only rearrange entries: views, permutations, slices, concatenation.

A shard of a dimension is a digit of the flat index: with `O` the product of all sizes before it
(times its segments), entry i belongs to rank (i // inner) % m where outer O, m and inner
multiply to all entries. A view keeps the flat index, so the digit is found again in the
target's prefix products:

    [rows, 12, 3*8] S(2, 3)     O = rows * 12 * 3
    [rows, 12, 3, 8]            prefix products 1, rows, rows*12, rows*12*3   ->   S(3)

Where m does not divide the units of a shard, the digit is a range of units, of so many entries
that the target must have as a unit too:

    [rows, 12, 3*8] S(2, 1, 8) over 2 ranks     units of 8 entries in their order
    [rows, 12, 3, 8]                            suffix products ..., 8, 1     ->   S(2)"""

from collections.abc import Iterator
from math import gcd, prod
from typing import Any

import torch
from torch.fx import Node

from synchromesh.trace.nodes import by_operator, dim_of, dims_of
from synchromesh.values.placement import Placement, shard

from .operator import Emit, Operator, OpSpec, P, Replace, Rule, group_states, inside_rows, spread

aten = torch.ops.aten
SIZES = ("size", "shape", "sizes")  # names of the argument, of one view or another


def through(
    source: tuple[int, ...], target: tuple[int, ...], state: Placement, m: int
) -> Placement | None:
    """Where `state` of a tensor of shape `source` is found after a view as `target`."""
    outer = prod(source[: state.dim]) * state.segments
    even = state.even(source[state.dim], m)
    entries = state.unit * prod(source[state.dim + 1 :])  # of a unit, in the flat index
    before = 1
    for dim, size in enumerate(target):
        if before > outer:
            return None
        segments, rest = divmod(outer, before) if before else (0, 0)
        if segments and not rest:
            after = prod(target[dim + 1 :])
            if even and size % (segments * m) == 0:
                return shard(dim, segments)
            if not even and size % segments == 0 and entries % after == 0:
                return shard(dim, segments, entries // after)
        before *= size
    return None


def reshape(op: Operator) -> Iterator[OpSpec]:
    """view, reshape, flatten, unflatten: digits keep their place; sizes become local."""
    if op.overload == "dtype" or not op.outputs or not op.inputs:
        return
    source, target, m = op.inputs[0].shape, op.output.shape, op.m
    if prod(source) == 0:
        return
    sizes = () if op.name == "flatten" else op.constant(next(filter(op.takes, SIZES)))
    states = set(op.inputs[0].states)
    states |= {b for s in op.output.states if (b := through(target, source, s, m)) is not None}
    for before in sorted(states):
        after = through(source, target, before, m)
        if after is None:
            continue
        # a size that is left to be found cannot be found of nothing
        if op.output.populated(after, m) or -1 not in sizes:
            yield op.spec({0: before}, after, replace=_reshape(op, after))
    yield op.spec({0: P}, P, share=1.0)


def _reshape(op: Operator, state: Placement) -> Replace:
    length = op.output.shape[state.dim]

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        x = given["self"]
        if op.name == "flatten":
            return to.call(aten.flatten.using_ints, *given.values())
        sizes = list(given[next(n for n in SIZES if n in given)])
        first = dim_of(given["dim"], len(op.inputs[0].shape)) if op.name == "unflatten" else 0
        at = state.dim - first
        if 0 <= at < len(sizes) and sizes[at] != -1:
            # a node: rows x something that is sharded
            entries = sizes[at] if isinstance(sizes[at], Node) else length
            sizes[at] = op.local(to, length, state, entries)
        if op.name == "unflatten":
            return to.call(aten.unflatten.int, x, given["dim"], sizes)
        # a shard need not be contiguous where the tensor was
        return to.call(aten.reshape.default, x, sizes)

    return emit


def as_reshape(to: Emit, given: dict[str, Any]) -> Node:
    """A view of a tensor whose strides may be others than when it was traced."""
    if "dtype" in given:
        return to.call(aten.view.dtype, *given.values())
    return to.call(aten.reshape.default, given["self"], given["size"])


def as_contiguous(to: Emit, given: dict[str, Any]) -> Node:
    """A complex view, which wants both parts of an entry side by side."""
    return to.call(aten.view_as_complex.default, to.call(aten.contiguous.default, given["self"]))


STRIDED = {"view": as_reshape, "_unsafe_view": as_reshape, "view_as_complex": as_contiguous}


def permute(op: Operator) -> Iterator[OpSpec]:
    """Every dim, where it goes."""
    n = len(op.inputs[0].shape)
    order = list(range(n))
    if op.name == "permute":
        order = dims_of(op.constant("dims"), n)
    elif op.name in ("transpose", "swapaxes", "swapdims"):
        names = ("dim0", "dim1") if op.name != "swapaxes" else ("axis0", "axis1")
        a, b = (dim_of(op.constant(name), n) for name in names)
        order[a], order[b] = order[b], order[a]
    elif op.name == "movedim":
        if op.overload != "int":
            return
        moved = order.pop(dim_of(op.constant("source"), n))
        order.insert(dim_of(op.constant("destination"), n), moved)
    else:  # t, mT, mH, adjoint, numpy_T, matrix_H
        order = order[::-1] if op.name == "numpy_T" else order[:-2] + order[-2:][::-1]
    yield from op.mapped([order.index(d) for d in range(n)])


def unsqueeze(op: Operator) -> Iterator[OpSpec]:
    """Every dim; the new one is never cut."""
    n = len(op.inputs[0].shape)
    dim = dim_of(op.constant("dim"), n + 1)
    yield from op.mapped([d + (d >= dim) for d in range(n)])


def squeeze(op: Operator) -> Iterator[OpSpec]:
    """The dims that it takes away are named: a shard may have one entry of more."""
    shape = op.inputs[0].shape
    given = op.constant("dim")
    named = dims_of(range(len(shape)) if given is None else given, len(shape))
    gone = {d for d in named if shape[d] == 1}
    kept = [d for d in range(len(shape)) if d not in gone]

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        return to.call(aten.squeeze.dims, given["self"], sorted(gone))

    dims = [kept.index(d) if d not in gone else None for d in range(len(shape))]
    yield from op.mapped(dims, replace=emit)


def expand(op: Operator) -> Iterator[OpSpec]:
    """Kept dims stay sharded; a new or repeated dim can be made in parts (partial gradient)."""
    x, out = op.inputs[0], op.output
    if len(op.inputs) > 1:  # expand_as
        return
    offset = len(out.shape) - len(x.shape)
    states = set(out.states) | {
        s.at(s.dim + offset) for s in x.states if x.shape[s.dim] == out.shape[s.dim + offset]
    }
    for state in sorted(s for s in states if not inside_rows(s)):
        dim = state.dim - offset
        kept = dim >= 0 and x.shape[dim] == out.shape[state.dim]
        yield op.spec({0: state.at(dim) if kept else None}, state, replace=_expand(op, state))
    yield op.spec({0: P}, P, share=1.0)


def _expand(op: Operator, state: Placement) -> Replace:
    length = op.output.shape[state.dim]

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        sizes = list(given["size"])
        if sizes[state.dim] != -1:
            sizes[state.dim] = op.local(to, length, state, length)
        return to.original(op.node, {**given, "size": sizes})

    return emit


def sliced(op: Operator) -> Iterator[OpSpec]:
    """select, slice, narrow, unbind: every dim but the cut one; a full slice cuts none."""
    x = op.inputs[0]
    dim = dim_of(op.constant("dim", 0), len(x.shape))
    removed = op.name in ("select", "unbind")
    is_open = op.constant("start") in (None, 0) and op.constant("end") in (None, 2**63 - 1)
    # with such ends a slice means everything, whatever the size of its dimension
    everything = op.name == "slice" and all(o.shape[dim] == x.shape[dim] for o in op.outputs)
    dims: list[int | None] = [d - (removed and d > dim) for d in range(len(x.shape))]
    for spec in op.mapped(dims):
        state = spec.inputs[0]
        if not (state.sharded and state.dim == dim) or (everything and is_open):
            yield spec


def split(op: Operator) -> Iterator[OpSpec]:
    """Other dims pass; along `dim` every part is sharded, a segment per greatest divisor."""
    x = op.inputs[0]
    dim = dim_of(op.constant("dim", 0), len(x.shape))
    sizes = [o.shape[dim] for o in op.outputs]
    dims: list[int | None] = [d if d != dim else None for d in range(len(x.shape))]
    yield from op.mapped(dims)
    if not sizes or dim == x.rows_dim:
        return
    if sum(sizes) != x.shape[dim]:
        return  # the parts overlap where places run backwards
    for segment, unit in _segments(op, dim, sizes, x.shape[dim]):
        outputs = tuple(shard(dim, s // segment, unit) for s in sizes)
        before = shard(dim, x.shape[dim] // segment, unit)
        yield op.spec({0: before}, outputs, replace=_split(op, dim, sizes, outputs))


def _split(op: Operator, dim: int, sizes: list[int], outputs: tuple[Placement, ...]) -> Replace:
    def emit(to: Emit, given: dict[str, Any]) -> Node:
        local = [op.local(to, n, s, n) for n, s in zip(sizes, outputs, strict=True)]
        return to.call(aten.split_with_sizes.default, given["self"], local, dim)

    return emit


def cat(op: Operator) -> Iterator[OpSpec]:
    """Other dims pass; along `dim` the parts are segments of the result."""
    slots = op.given_slots("tensors")
    n = len(op.output.shape)
    if len(slots) != len(op.inputs) or any(len(x.shape) != n for x in op.inputs):
        return
    dim = dim_of(op.constant("dim", 0), n)
    states = set(op.output.states).union(*(x.states for x in op.inputs))
    for state in sorted(s for s in states if s.dim != dim):
        yield op.spec(dict.fromkeys(slots, state), state)
    if all(x.floating for x in op.inputs):
        yield op.spec(dict.fromkeys(slots, P), P, share=1.0)
    sizes, whole = [x.shape[dim] for x in op.inputs], op.output.shape[dim]
    for segment, unit in _segments(op, dim, sizes, whole):
        inputs = {i: shard(dim, s // segment, unit) for i, s in zip(slots, sizes, strict=True)}
        yield op.spec(inputs, shard(dim, whole // segment, unit))


def _segments(op: Operator, dim: int, parts: list[int], whole: int) -> list[tuple[int, int]]:
    """Sizes of a segment of the parts, and of its units: greatest divisor, and as asked for."""
    common = gcd(*parts)
    if common == 0:
        return []
    asked = {(common, 1)}
    for x in (*op.inputs, *op.outputs):
        if x.shape[dim] in (*parts, whole):
            asked |= {(x.shape[dim] // s.segments, s.unit) for s in x.cuts(dim)}
    dividing = ((n, unit) for n, unit in asked if common % n == 0)
    return sorted((n, unit) for n, unit in dividing if shard(0, 1, unit).fits((n,), op.m))


def stack(op: Operator) -> Iterator[OpSpec]:
    """Every dim of the parts; the new one is never cut."""
    dim = dim_of(op.constant("dim", 0), len(op.output.shape))
    states = {s for x in op.inputs for s in x.states}
    states |= {s.at(s.dim - (s.dim > dim)) for s in op.output.states if s.dim != dim}
    for state in sorted(states):
        made = state.at(state.dim + (state.dim >= dim))
        yield op.spec(dict.fromkeys(range(len(op.inputs)), state), made)


def roll(op: Operator) -> Iterator[OpSpec]:
    """roll and flip: dims that are not moved."""
    moved = dims_of(op.constant("dims"), len(op.inputs[0].shape))
    if moved:
        yield from op.along(*moved, linear=True)


def pad(op: Operator) -> Iterator[OpSpec]:
    """Dims without padding. Padding by zeros is linear."""
    given = op.constant("pad") or op.constant("padding") or ()
    if all(isinstance(p, int) for p in given):
        n = len(op.inputs[0].shape)
        padded = {n - 1 - i // 2 for i, p in enumerate(given) if p}
        zeros = op.constant("mode", "constant") != "constant" or not op.constant("value")
        yield from op.on_entries(op.along(*padded, linear=zeros))


def repeat(op: Operator) -> Iterator[OpSpec]:
    """Tiles: the segments of a repeated dim are repeated."""
    x, counts = op.inputs[0], op.constant("repeats")
    if not all(isinstance(c, int) for c in counts):
        return
    offset = len(counts) - len(x.shape)
    for s in x.states:
        dim = s.dim + offset
        yield op.spec({0: s}, shard(dim, s.segments * counts[dim], s.unit))
    yield op.spec({0: P}, P, share=1.0)


def repeat_interleave(op: Operator) -> Iterator[OpSpec]:
    """Every dim, where entries are repeated a fixed number of times: copies stay together."""
    named = op.constant("dim") is not None and op.constant("output_size") is None
    if op.overload != "self_int" or not named:
        return
    x, out = op.inputs[0], op.output
    dim = dim_of(op.constant("dim"), len(x.shape))
    yield from op.along(dim, linear=True)
    length, made = x.shape[dim], out.shape[dim]
    if not made:
        return
    for s in group_states(length, op.m, [(length, x.cuts(dim)), (made, out.cuts(dim))]):
        yield op.spec({0: s.at(dim)}, spread(s, length, made, dim, op.m))


def triangle(op: Operator) -> Iterator[OpSpec]:
    """tril, triu: all but the last two dims."""
    n = len(op.inputs[0].shape)
    yield from op.along(n - 2, n - 1, linear=True)


def two_parts(op: Operator) -> Iterator[OpSpec]:
    """Parts of complex entries are never cut; the backward of view_as_real needs entries."""
    dims: list[int | None] = list(range(len(op.inputs[0].shape)))
    specs = op.mapped([*dims[:-1], None] if op.name == "view_as_complex" else dims)
    yield from op.on_entries(specs)


PERMUTATIONS = (
    "permute", "transpose", "t", "swapaxes", "swapdims", "movedim", "numpy_T", "mT", "mH",
    "adjoint", "matrix_H",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **by_operator({
        reshape: "view reshape _unsafe_view flatten unflatten view_copy",
        two_parts: "view_as_real view_as_complex",
        unsqueeze: "unsqueeze",
        squeeze: "squeeze",
        expand: "expand",
        sliced: "select slice narrow unbind",
        split: "split split_with_sizes chunk tensor_split",
        cat: "cat concat concatenate",
        stack: "stack",
        roll: "roll flip",
        pad: "pad constant_pad_nd reflection_pad2d replication_pad2d",
        repeat: "repeat",
        repeat_interleave: "repeat_interleave",
        triangle: "tril triu",
    }),
    **dict.fromkeys(PERMUTATIONS, permute),
}  # fmt: skip
