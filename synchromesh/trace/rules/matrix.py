"""Rules for matrix products: linear, addmm, matmul and its forms, einsum."""

from collections.abc import Iterator

from synchromesh.trace.nodes import by_operator
from synchromesh.values.placement import Placement, shard

from .elementwise import dim_state
from .operator import Operand, Operator, OpSpec, P, Rule, r


def linear(op: Operator) -> Iterator[OpSpec]:
    """y = x W^T + b: by output columns, by input columns (partial), by another dim of x."""
    yield from _product(op, "input", "weight", "bias", weight_in=1, weight_out=0)


def addmm(op: Operator) -> Iterator[OpSpec]:
    """b + x W, the linear layer of GPT-2."""
    bias = op.tensor("self")
    if op.constant("beta") != 1 or op.constant("alpha") != 1 or len(bias.shape) != 1:
        return
    if op.output is not None and bias.shape[0] != op.output.shape[-1]:
        return
    yield from _product(op, "mat1", "mat2", "self", weight_in=0, weight_out=1)


def _product(
    op: Operator, x: str, weight: str, bias: str, *, weight_in: int, weight_out: int
) -> Iterator[OpSpec]:
    out, w = op.output, op.tensor(weight)
    if len(w.shape) != 2:
        return
    last = len(out.shape) - 1
    columns = _segments(out, last) | _segments(w, weight_out)
    if op.slot(bias) is not None:
        columns |= _segments(op.tensor(bias), 0)
    for n in sorted(columns):
        states = {weight: shard(weight_out, n), bias: shard(0, n)}
        yield op.spec(states, shard(last, n))
    for n in sorted(_segments(op.tensor(x), last) | _segments(w, weight_in)):
        yield op.spec({x: shard(last, n), weight: shard(weight_in, n), bias: P}, P)
    for s in sorted({s for s in (*out.states, *op.tensor(x).states) if s.dim != last}):
        yield op.spec({x: s}, s)


def _segments(x: Operand, dim: int) -> set[int]:
    return {s.segments for s in x.states if s.dim == dim}


def matmul(op: Operator) -> Iterator[OpSpec]:
    """[.., i, k] @ [.., k, j]: batch dims (broadcasting), i, j, and k (partial)."""
    a, b, out = op.inputs[0], op.inputs[1], op.output
    if min(len(a.shape), len(b.shape)) < 2 or len(op.inputs) != 2:
        return
    n, i, j = len(out.shape), len(out.shape) - 2, len(out.shape) - 1
    batch: set[Placement] = set(out.states)
    for x in (a, b):
        offset = n - len(x.shape)
        batch |= {shard(s.dim + offset, s.segments) for s in x.states}
    for s in sorted(x for x in batch if x.dim < i):
        yield op.spec({0: dim_state(a, out, s), 1: dim_state(b, out, s)}, s)
    a_last, b_last = len(a.shape) - 1, len(b.shape) - 1
    for g in sorted(_segments(a, a_last - 1) | _segments(out, i)):
        yield op.spec({0: shard(a_last - 1, g)}, shard(i, g))
    for g in sorted(_segments(b, b_last) | _segments(out, j)):
        yield op.spec({1: shard(b_last, g)}, shard(j, g))
    for g in sorted(_segments(a, a_last) | _segments(b, b_last - 1)):
        yield op.spec({0: shard(a_last, g), 1: shard(b_last - 1, g)}, P)


def baddbmm(op: Operator) -> Iterator[OpSpec]:
    """c + a @ b in batches; beta and alpha are numbers."""
    out = op.output
    c, a, b = (op.tensor(n) for n in ("self", "batch1", "batch2"))
    for s in sorted({*out.states, *a.states, *b.states}):
        if s.dim == 0:
            yield op.spec({"self": dim_state(c, out, s), "batch1": s, "batch2": s}, s)
    for g in sorted(_segments(out, 1) | _segments(a, 1)):
        yield op.spec({"self": dim_state(c, out, shard(1, g)), "batch1": shard(1, g)}, shard(1, g))
    for g in sorted(_segments(out, 2) | _segments(b, 2)):
        yield op.spec({"self": dim_state(c, out, shard(2, g)), "batch2": shard(2, g)}, shard(2, g))


def einsum(op: Operator) -> Iterator[OpSpec]:
    """Any letter: inputs that have it are sharded there, the others replicated; partial when it is
    summed over."""
    equation = op.constant("equation").replace(" ", "")
    if "." in equation or "->" not in equation:
        return
    left, right = equation.split("->")
    terms = left.split(",")
    slots = [s for s in op.slots("tensors") if s is not None]
    if len(slots) != len(terms) or any(len(set(t)) != len(t) for t in (*terms, right)):
        return
    for letter in sorted({c for t in terms for c in t}):
        found: set[int] = set()
        states: dict[str | int, Placement | None] = {}
        for slot, term in zip(slots, terms, strict=True):
            if letter in term:
                found |= _segments(op.inputs[slot], term.index(letter))
        for n in sorted(found):
            states = {
                slot: shard(t.index(letter), n) if letter in t else r
                for slot, t in zip(slots, terms, strict=True)
            }
            yield op.spec(states, shard(right.index(letter), n) if letter in right else P)


RULES: dict[str, Rule] = by_operator({
    linear: "linear",
    addmm: "addmm",
    matmul: "matmul bmm mm linalg_matmul",
    baddbmm: "baddbmm",
    einsum: "einsum",
})  # fmt: skip
