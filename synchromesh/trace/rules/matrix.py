"""Rules for matrix products: linear, addmm, matmul and its forms, einsum."""

from collections.abc import Iterator

from synchromesh.trace.nodes import by_operator
from synchromesh.values.placement import Placement

from .elementwise import dim_state
from .operator import Operator, OpSpec, P, Rule


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
    columns = out.cuts(last) | w.cuts(weight_out)
    if op.slot(bias) is not None:
        columns |= op.tensor(bias).cuts(0)
    for s in sorted(columns):
        yield op.spec({weight: s.at(weight_out), bias: s}, s.at(last))
    for s in sorted(op.tensor(x).cuts(last) | w.cuts(weight_in)):
        yield op.spec({x: s.at(last), weight: s.at(weight_in), bias: P}, P)
    for s in sorted({s for s in (*out.states, *op.tensor(x).states) if s.dim != last}):
        yield op.spec({x: s}, s)


def matmul(op: Operator) -> Iterator[OpSpec]:
    """[.., i, k] @ [.., k, j]: batch dims (broadcasting), i, j, and k (partial)."""
    a, b, out = op.inputs[0], op.inputs[1], op.output
    if min(len(a.shape), len(b.shape)) < 2:
        return
    n, i, j = len(out.shape), len(out.shape) - 2, len(out.shape) - 1
    batch: set[Placement] = set(out.states)
    for x in (a, b):
        batch |= {s.at(s.dim + n - len(x.shape)) for s in x.states}
    for s in sorted(x for x in batch if x.dim < i):
        yield op.spec({0: dim_state(a, out, s), 1: dim_state(b, out, s)}, s)
    a_last, b_last = len(a.shape) - 1, len(b.shape) - 1
    for s in sorted(a.cuts(a_last - 1) | out.cuts(i)):
        yield op.spec({0: s.at(a_last - 1)}, s.at(i))
    for s in sorted(b.cuts(b_last) | out.cuts(j)):
        yield op.spec({1: s.at(b_last)}, s.at(j))
    for s in sorted(a.cuts(a_last) | b.cuts(b_last - 1)):
        yield op.spec({0: s.at(a_last), 1: s.at(b_last - 1)}, P)


def baddbmm(op: Operator) -> Iterator[OpSpec]:
    """c + a @ b in batches; beta and alpha are numbers."""
    out = op.output
    c, a, b = (op.tensor(n) for n in ("self", "batch1", "batch2"))
    for s in sorted({*out.states, *a.states, *b.states}):
        if s.dim == 0:
            yield op.spec({"self": dim_state(c, out, s), "batch1": s, "batch2": s}, s)
    for name, x, dim in (("batch1", a, 1), ("batch2", b, 2)):
        for s in sorted(cut.at(dim) for cut in out.cuts(dim) | x.cuts(dim)):
            yield op.spec({"self": dim_state(c, out, s), name: s}, s)


def einsum(op: Operator) -> Iterator[OpSpec]:
    """Any letter: inputs that have it are sharded there; partial when it is summed over. No
    equations with an ellipsis, an implicit output or a diagonal."""
    inputs, arrow, made = op.constant("equation").replace(" ", "").partition("->")
    given, slots = inputs.split(","), op.given_slots("tensors")
    diagonal = any(len(set(term)) < len(term) for term in (*given, made))
    if "." in inputs + made or not arrow or len(slots) != len(given) or diagonal:
        return
    terms = dict(zip(slots, given, strict=True))
    for letter in sorted(set().union(*terms.values())):
        dims = {slot: term.index(letter) for slot, term in terms.items() if letter in term}
        for s in sorted(set().union(*(op.inputs[slot].cuts(d) for slot, d in dims.items()))):
            output = s.at(made.index(letter)) if letter in made else P
            yield op.spec({slot: s.at(d) for slot, d in dims.items()}, output)


RULES: dict[str, Rule] = by_operator({
    linear: "linear",
    addmm: "addmm",
    matmul: "matmul bmm mm linalg_matmul",
    baddbmm: "baddbmm",
    einsum: "einsum",
})  # fmt: skip
