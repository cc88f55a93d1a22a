"""Proofs of rows in another order: a step computes a permutation, and undoes it again.

    places = ids.argsort()              a permutation p, whatever the ids are
    made = h[places // k] @ w           rows of h, k times each, in the order of p
    made[places.argsort()]              in order again; so is h.index_add(0, places // k, made)

Which permutation it is does not matter, so no row depends on another one through it. Whatever else
is computed from values in such an order depends on it, and couples rows.
"""

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.guards import ROWS
from synchromesh.trace.nodes import all_arguments, by_operator, described, dims_of, short_name
from synchromesh.trace.rules.elementwise import FILLING

from ..row_layout import Case, Irregular, Order, RowLayout, RowOperand, unproved_layout
from .elementwise import along_dims
from .indexing import known

Found = RowLayout | Order | None  # in order, in another one, or not proved
COUNTS = {"histc"}  # reductions to which the order does not matter
COPIES = {"to", "_to_copy", "clone", "contiguous", "detach", "alias"}
VIEWS = COPIES | {"reshape", "view", "flatten", "squeeze", "unsqueeze", "transpose", "permute"}
RANKINGS = {"topk", "sort", "argsort", "argmax"}  # whose indices are at least 0


def ordered(case: Case) -> RowLayout:
    """sort, argsort: of one dimension a permutation, and the entries in its order."""
    source = case.first
    if source.rank > 1:
        return along_dims(case)
    kind = "places" if case.name == "argsort" or case.index else "values"
    layout = source.layout if kind == "values" else case.result.in_any_order
    raise disordered(Order(case.node, kind, layout))


def disordered(order: Order) -> Irregular:
    """The status of a value in this order."""
    return Irregular(f"has rows in the order of {described(order.by)}", order=order)


def carried(case: Case, prove: Callable[[Case], RowLayout]) -> RowLayout:
    """The layout of what is computed from values in another order; raises Irregular."""
    rule = RULES.get(case.name)
    found = rule(case) if rule else None
    found = found or entrywise(case, prove)
    if found is None:
        why = dependent(case)
        raise Irregular(f"has rows that depend on each other ({why})", why)
    if isinstance(found, Order):
        raise disordered(found)
    return found


def dependent(case: Case) -> str:
    """The clause for an operator to which the order of what it reads matters, or may matter."""
    order = next(e.order for e in case.operands if e.order)
    return f"{case.where} depends on the order of {described(order.by)}"


def entrywise(case: Case, prove: Callable[[Case], RowLayout]) -> Found:
    """An operator that computes each entry along dimension 0 from those at its place: one of which
    the rows would be proved if every entry were one."""
    found = {e.order for e in case.with_rows}
    orders = [order for order in found if order]
    first, count = orders[0], orders[0].layout.count
    if None in found or len({(order.by, order.kind) for order in orders}) > 1:
        return None
    if first.kind != "values":
        filled = case.result.in_any_order if case.name in FILLING else None
        return first if case.name in COPIES else filled
    segments = first.layout.segments.intersection(*(order.layout.segments for order in orders))

    def alone(sizes: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(s.subs(ROWS, ROWS / count) for s in sizes)  # type: ignore[attr-defined]

    operands = {
        (e.node, e.argument): replace(e, sizes=alone(e.sizes), rows=e.rows and ENTRY)
        for e in case.operands
    }
    sizes = alone(case.sizes)
    if not segments or unproved_layout(sizes) != RowLayout(0, 1):
        return None
    try:
        prove(Case(case.node, case.index, sizes, ENTRY, lambda n, a: operands.get((n, a))))
    except Irregular:
        return None
    return Order(first.by, "values", RowLayout(0, count, segments))


ENTRY = RowLayout(0, 1, frozenset({1}))


def divided(case: Case) -> Found:
    """places // k, of entries of which k are of one place."""
    order, k = case.first.order, case.node.args[1]
    if case.name == "div" and case.constant("rounding_mode") != "floor":
        return None
    if order is None or order.kind != "places" or not isinstance(k, int) or k < 1:
        return None
    per = order.per * k
    return None if order.layout.count % per else replace(order, per=per)


def reversed_(case: Case) -> Found:
    """argsort of a permutation."""
    order = case.first.order
    indices = case.name == "argsort" or case.index == 1
    if order is None or not indices or order.per > 1 or case.constant("descending"):
        return None
    kind = {"places": "inverse", "inverse": "places"}.get(order.kind)
    return replace(order, kind=kind) if kind else None


def along_rows(case: Case, count: int) -> list[RowOperand] | None:
    """The `count` tensors of an operator that has one index, along dimension 0."""
    indices = case.arguments.get("indices", [None])
    dim = case.constant("dim", 0)
    if len(indices) > 1 or len(case.operands) != count or not isinstance(dim, int):
        return None
    one = case.name in ("gather", "scatter", "scatter_add") and case.first.rank > 1
    return None if one or dims_of(dim, case.first.rank) != [0] else case.operands


def picked(case: Case) -> Found:
    """x[places // k] and made[inverse]."""
    source, index = along_rows(case, 2) or (None, None)
    if source is None or index is None or (order := index.order) is None:
        return None
    if order.kind == "places" and isinstance(source.rows, RowLayout) and not source.layout.dim:
        layout = RowLayout(0, order.layout.count, source.layout.segments)
        complete = source.layout.count * order.per == order.layout.count
        return Order(order.by, "values", layout) if complete else None
    return in_order(source, order) if order.kind == "inverse" else None


def in_order(values: RowOperand, order: Order) -> RowLayout | None:
    """The layout of `values` once they are put back, None where they have another order."""
    found = values.order
    same = found is not None and found.kind == "values" and found.by is order.by
    return found.layout if found and same else None


def put_back(case: Case) -> Found:
    """out[places] = made; of places alone the inverse; out.index_add(0, places // k, made)."""
    base, index, values = along_rows(case, 3) or (None, None, None)
    if base is None or index is None or values is None or (order := index.order) is None:
        return None
    if order.kind != "places" or values.rank != base.rank or case.constant("alpha", 1) != 1:
        return None
    found = in_order(values, order)
    if case.constant("accumulate") or case.name in ("index_add", "scatter_add"):
        if found is None or not isinstance(base.rows, RowLayout) or base.layout.dim:
            return None
        segments = {s for s in found.segments if not found.count // s % order.per}
        segments &= base.layout.segments
        return case.result.with_segments(segments) if segments else None
    if order.per > 1:
        return None
    if found is None and all(counting(values.node, rows, order) for rows in (1, 2, 3)):
        return replace(order, kind="inverse")
    return found


def counting(node: Node, rows: int, order: Order) -> bool:
    """Whether the node is 0, 1, 2 ..., for so many rows."""
    found = known(node, rows)
    return found is not None and torch.equal(found, torch.arange(order.layout.count * rows))


def grouped(case: Case) -> Found:
    """grouped_mm: each entry by the weight of its own group, where entries are sorted by group and
    the groups end where counts of the same ids say."""
    order = case.first.order
    others = [e for e in case.operands[1:] if e.rows is not None]
    if order is None or order.kind != "values" or others or short_name(order.by) != "sort":
        return None
    ends, groups = case.arguments.get("offs"), int(case.operands[1].sizes[0])
    if not isinstance(ends, Node) or not counts_of(ends, order.by, groups):
        return None
    meta.grouped.set(case.node, True)
    return order


def counts_of(ends: Node, by: Node, groups: int) -> bool:
    """Whether `ends` are the running counts of the ids 0, 1, ... that `by` sorts."""
    total = behind(ends, COPIES)
    counted = behind(total.args[0], COPIES) if short_name(total) == "cumsum" else None  # type: ignore[arg-type]
    if counted is None or short_name(counted) != "histc" or all_arguments(by)["descending"]:
        return False
    given, key = all_arguments(counted), by.args[0]
    ids = behind(given["self"], COPIES)
    same = ids is key or (ids.target is operator.getitem and ids.args == (by, 0))
    ranking = behind(key, VIEWS)  # type: ignore[arg-type]
    if ranking.target is operator.getitem and ranking.args[1] == 1:
        ranking = ranking.all_input_nodes[0]
    elif short_name(ranking) not in ("argsort", "argmax"):
        return False
    bounds = [given[name] for name in ("bins", "min", "max")]
    return same and short_name(ranking) in RANKINGS and bounds == [groups, 0, groups - 1]


def behind(node: Node, names: set[str]) -> Node:
    """The first node behind operators of these names that is of none of them."""
    while short_name(node) in names:
        node = node.all_input_nodes[0]
    return node


RULES: dict[str, Callable[[Case], Found]] = by_operator({
    divided: "floor_divide div",
    reversed_: "sort argsort",
    picked: "index index_select gather",
    put_back: "index_put index_copy index_add scatter scatter_add",
    grouped: "grouped_mm _grouped_mm grouped_mm_fallback",
})  # fmt: skip
