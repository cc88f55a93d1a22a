"""Proofs of rows in another order: a step computes a permutation, and undoes it again.

    places = ids.argsort()              a permutation p, whatever the ids are
    made = h[places // k] @ w           rows of h, k times each, in the order of p
    made[places.argsort()]              in order again; so is h.index_add(0, places // k, made)

Which permutation it is does not matter, so no row depends on another one through it. Whatever else
is computed from values in such an order depends on it, and couples rows."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import all_arguments, by_operator, described, short_name
from synchromesh.trace.rules.elementwise import FILLING
from synchromesh.trace.step import ROWS

from ..row_layout import Case, IrregularRows, Order, RowLayout, RowOperand
from .trial import known

Arrangement = RowLayout | Order | None  # in order, in another one, or not proved
Prove = Callable[[Case], RowLayout]
COUNTS = {"histc"}  # reductions to which the order does not matter
COPIES = {"to", "_to_copy", "clone", "contiguous", "detach", "alias"}
OPPOSITE = {"places": "inverse", "inverse": "places"}
ENTRY = RowLayout(0, 1, frozenset({1}))


def concerns(case: Case) -> bool:
    """Whether the operator brings rows into another order, or reads such rows."""
    permutes = case.name in ("sort", "argsort") and case.first.rank == 1
    return permutes or any(e.order for e in case.operands)


def carried(case: Case, prove: Prove) -> RowLayout:
    """The layout of what is computed of values in another order; raises IrregularRows."""
    rule = RULES.get(case.name)
    rows = (rule(case) if rule else None) or entrywise(case, prove)
    if isinstance(rows, Order):
        raise IrregularRows(f"has rows in the order of {described(rows.by)}", order=rows)
    if rows is None:
        why = dependent(case)
        raise IrregularRows(f"has rows that depend on each other ({why})", why)
    return rows


def dependent(case: Case) -> str:
    """The clause for an operator to which the order of what it reads may matter."""
    order = next(e.order for e in case.operands if e.order)
    return f"{case.where} depends on the order of {described(order.by)}"


def entrywise(case: Case, prove: Prove) -> Arrangement:
    """An operator that computes each entry of values in one order from those at its place."""
    orders = [e.order for e in case.with_rows]
    first = next(filter(None, orders))
    if first.kind != "values":
        filled = case.result.in_any_order if case.name in FILLING else None
        return first if case.name in COPIES else filled
    layouts = [o.layout for o in orders if o and (o.by, o.kind) == (first.by, first.kind)]
    segments = first.layout.segments.intersection(*(layout.segments for layout in layouts))
    entries = [e.node for e in case.with_rows]
    if not segments or len(layouts) < len(orders) or not apart(case, entries, prove):
        return None
    return replace(first, layout=first.layout.with_segments(segments))


def apart(case: Case, entries: Sequence[Node], prove: Prove) -> bool:
    """Whether each entry along dimension 0 is computed from those at its place of `entries`."""
    whole = next(e.sizes[0] for e in case.operands if e.node in entries)

    def sizes(given: tuple[Any, ...], wanted: bool) -> tuple[Any, ...]:
        if [(d, s) for d, s in enumerate(given) if s.free_symbols] != [(0, whole)] * wanted:
            raise case.unproved()  # they vary along another dimension, or not as the entries do
        return (ROWS, *given[1:]) if wanted else given

    def as_rows(e: RowOperand) -> RowOperand:
        several = e.node in entries
        return replace(e, sizes=sizes(e.sizes, several), rows=ENTRY if several else None)

    try:
        given = {(e.node, e.argument): as_rows(e) for e in case.operands}
        made = sizes(case.sizes, True)
        prove(Case(case.node, case.index, made, ENTRY, lambda n, a: given.get((n, a))))
    except IrregularRows:
        return False
    return True


def permuted(case: Case) -> Arrangement:
    """sort, argsort: values and places; of places the inverse."""
    order, indices = case.first.order, case.name == "argsort" or case.index == 1
    if order is None:
        layout = case.result.in_any_order if indices else case.first.layout
        return Order(case.node, "places" if indices else "values", layout)
    if not indices or order.kind == "values" or order.per > 1 or case.constant("descending"):
        return None
    return replace(order, kind=OPPOSITE[order.kind])


def divided(case: Case) -> Arrangement:
    """places // k, of entries of which k are of one place."""
    order, k = case.first.order, case.node.args[1]
    if order is None or order.kind != "places" or not isinstance(k, int) or k < 1:
        return None
    return None if order.layout.count % (order.per * k) else replace(order, per=order.per * k)


def order_of_index(case: Case) -> Order | None:
    """That of an operator's one index, along dimension 0."""
    indices, dim = case.arguments.get("indices", [None]), case.constant("dim", 0)
    index = next(e for e in case.operands if e.argument in ("indices", "index"))
    return index.order if len(indices) == 1 and dim in (0, -case.first.rank) else None


def in_order(values: RowOperand, order: Order | None) -> RowLayout | None:
    """The layout of `values` once they are put back, None where they have another order."""
    own = values.order
    same = own and order and own.kind == "values" and own.by is order.by
    return own.layout if own and same else None


def picked(case: Case) -> Arrangement:
    """x[places // k] and made[inverse]."""
    order, source = order_of_index(case), case.first
    if order is None or order.kind == "inverse":
        return in_order(source, order)
    if order.kind != "places" or not isinstance(source.rows, RowLayout) or source.layout.dim:
        return None
    layout = RowLayout(0, order.layout.count, source.layout.segments)
    complete = source.layout.count * order.per == layout.count
    return Order(order.by, "values", layout) if complete else None


def put_back(case: Case) -> Arrangement:
    """out[places] = made; of places alone the inverse; out.index_add(0, places // k, made)."""
    (base, _, values), order = case.operands, order_of_index(case)
    if order is None or order.kind != "places" or values.rank != base.rank:
        return None
    made = in_order(values, order)
    if case.constant("accumulate") or case.name == "index_add":
        return None if made is None else added(case, base, made, order)
    if order.per > 1:
        return None
    return made or (replace(order, kind="inverse") if are_places(values, order) else None)


def added(case: Case, base: RowOperand, made: RowLayout, order: Order) -> Arrangement:
    """Values in order, some for each entry of `base`, are added to that entry."""
    if not isinstance(base.rows, RowLayout) or case.constant("alpha", 1) != 1 or base.layout.dim:
        return None
    count = order.layout.count
    segments = {s for s in base.layout.segments & made.segments if not count // s % order.per}
    return case.result.with_segments(segments) if segments else None


def are_places(values: RowOperand, order: Order) -> bool:
    """Whether values are 0, 1, ... for all entries of an order, whatever the number of rows."""
    for rows in (1, 2, 3):
        line = known(values.node, rows)
        if line is None or not torch.equal(line, torch.arange(order.layout.count * rows)):
            return False
    return True


def grouped(case: Case) -> Arrangement:
    """grouped_mm: each entry by the weight of its own group, where entries are sorted by group and
    the groups end where running counts of the same ids 0, 1, ... say."""
    order, ends = case.first.order, case.arguments.get("offs")
    if not isinstance(ends, Node) or order is None or order.kind != "values":
        return None
    total = content_of(ends)
    counts = content_of(total.args[0]) if short_name(total) == "cumsum" else None
    if counts is None or short_name(counts) != "histc":
        return None
    groups = int(case.operands[1].sizes[0])
    others = len(case.with_rows) > 1 or all_arguments(order.by)["descending"]
    meta.grouped.set(case.node, counts_sorted(counts, order.by, groups) and not others)
    return order if meta.grouped(case.node) else None


def counts_sorted(counts: Node, by: Node, groups: int) -> bool:
    """Whether a histogram has a bin for each of the groups, and is of the ids that `by` sorts."""
    given = all_arguments(counts)
    ids = content_of(given["self"])
    same = ids is by.args[0] or (ids.target is operator.getitem and ids.args == (by, 0))
    return same and [given[name] for name in ("bins", "min", "max")] == [groups, 0, groups - 1]


def content_of(node: Any) -> Node:
    """The node that has the content of `node`, which may be a copy."""
    while short_name(node) in COPIES:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


RULES: dict[str, Callable[[Case], Arrangement]] = by_operator({
    permuted: "sort argsort",
    divided: "floor_divide",
    picked: "index index_select",
    put_back: "index_put index_copy index_add",
    grouped: "_grouped_mm grouped_mm_fallback",
})  # fmt: skip
