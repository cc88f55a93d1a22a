"""Where the batch rows of every tensor of the graph lie, and its `Value`.

Rows are taken for regular only where that is proved (`proofs`); other values get
`meta.irregular`, a clause that says why, and stay inside their component."""

import operator

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import has_gradients, is_number
from synchromesh.trace.step import ROWS
from synchromesh.values.component import Rows, Value

from .proofs import crossed, order, prove
from .row_layout import (
    Case,
    IrregularRows,
    RowLayout,
    RowOperand,
    RowStatus,
    row_dims,
    sizes_of,
    unproved_layout,
)


def annotate(graph: Graph, symbols: set[sympy.Symbol]) -> None:
    """Gives nodes `meta.value`; `meta.irregular` where their rows are not proved to be apart, and
    `meta.coupling` where it is the node itself that makes them depend on each other. Nodes that
    make several tensors have tuples of the first two."""
    with torch.device("cpu"):  # of the small tensors that proofs compute with
        Annotation(symbols).write(graph)


class Annotation:
    """Where the rows of all tensors so far lie, by node and place in its results."""

    def __init__(self, symbols: set[sympy.Symbol]) -> None:
        self.symbols = symbols
        self.rows: dict[tuple[Node, int], RowStatus] = {}

    def write(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "output":
                continue
            count = len(meta.val(node)) if isinstance(meta.val(node), tuple) else 1
            values: list[Value | None] = [None] * count
            reasons: list[str | None] = [None] * count
            for at, tensor in meta.tensors(node):
                sizes = sizes_of(tensor, self.symbols)
                rows = self.rows[node, at] = self.status(node, at, sizes)
                values[at] = value_of(node, tensor, sizes, rows)
                if isinstance(rows, IrregularRows):
                    reasons[at] = rows.why
                    if rows.coupling:
                        meta.coupling.set(node, rows.coupling)
            several = isinstance(meta.val(node), tuple)
            meta.value.set(node, tuple(values) if several else values[0])
            if any(reasons):
                meta.irregular.set(node, tuple(reasons) if several else reasons[0])

    def status(self, node: Node, at: int, sizes: tuple[sympy.Expr, ...]) -> RowStatus:
        """How the rows of one result lie, or why that is not proved."""
        layout = unproved_layout(sizes)
        if node.op != "call_function":
            return layout.in_any_order if isinstance(layout, RowLayout) else layout
        if node.target is operator.getitem:
            source, item = node.args
            assert isinstance(source, Node) and isinstance(item, int)
            return self.rows[source, item]
        case = Case(node, at, sizes, layout, self.operand)
        if layout is None:
            if case.name not in order.COUNTS and any(e.order for e in case.operands):
                meta.coupling.set(node, order.dependent(case))
            return None
        if isinstance(layout, IrregularRows):
            return crossed(case, layout)
        try:
            return prove(case)
        except IrregularRows as irregular:
            return irregular
        except ZeroDivisionError:  # sizes that no small batch has
            return case.unproved()

    def operand(self, node: Node, argument: str) -> RowOperand | None:
        if is_number(node):
            return None
        sizes = sizes_of(meta.val(node), self.symbols)
        return RowOperand(node, argument, sizes, self.rows[node, 0])


def value_of(node: Node, tensor: Tensor, sizes: tuple[sympy.Expr, ...], rows: RowStatus) -> Value:
    """The description of a tensor; `shape` is that of one row."""
    where = None
    if isinstance(rows, RowLayout):
        segments = min(rows.segments)
        where = Rows(rows.dim, segments, rows.count // segments)
    elif isinstance(rows, IrregularRows):
        layout = unproved_layout(sizes)
        count = layout.count if isinstance(layout, RowLayout) else 1
        dims = row_dims(sizes)
        where = Rows(dims[0], 1, count, len(dims))
    return Value(
        meta.name(node) or node.name, tuple(size_of_a_row(e) for e in sizes),
        str(tensor.dtype).removeprefix("torch."), where,
        has_gradients(tensor.dtype) and meta.differentiable(node),
    )  # fmt: skip


def size_of_a_row(size: sympy.Expr, many: int = 64) -> int:
    """The size for a batch of one row; a share of many rows' where one row is too few for it."""
    try:
        return int(size.subs({ROWS: 1}))
    except ZeroDivisionError:
        return max(1, int(size.subs({ROWS: many})) // many)
