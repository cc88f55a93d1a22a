"""Where the batch rows of every tensor of the graph lie, and its `Value`.

Rows are taken for regular only where that is proved (`proofs`); other values get
`meta["irregular"]`, a clause that says why, and stay inside their component.
"""

import operator

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from synchromesh.trace.guards import ROWS
from synchromesh.values.component import Rows, Value

from .lay import Case, Entry, Fate, Irregular, Lay, is_number, results, sizes_of, spot
from .nodes import has_gradients
from .proofs import crossed, prove

Node = torch.fx.Node
MANY = 64  # rows, where one is too few for a size


def annotate(graph: torch.fx.Graph, symbols: set[sympy.Symbol]) -> None:
    """Give nodes `meta["value"]`; `meta["irregular"]` where their rows are not proved to be apart,
    and `meta["mixed"]` where it is the node itself that makes them depend on each other.

    Nodes that make several tensors have tuples of these.
    """
    with torch.device("cpu"):  # of the small tensors that proofs compute with
        Annotation(symbols).write(graph)


class Annotation:
    """The fates of the rows of all tensors so far, by node and place in its results."""

    def __init__(self, symbols: set[sympy.Symbol]) -> None:
        self.symbols = symbols
        self.fates: dict[tuple[Node, int], Fate] = {}

    def write(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "output":
                continue
            val = node.meta.get("val")
            found: dict[int, Value] = {}
            why: dict[int, str] = {}
            node.meta["value"] = None
            for at, tensor in results(node):
                fate = self.fates[node, at] = self.fate(node, at, tensor)
                found[at] = value_of(node, tensor, sizes_of(tensor, self.symbols), fate)
                if isinstance(fate, Irregular):
                    why[at] = fate.why
                    if fate.mixed:
                        node.meta["mixed"] = fate.mixed
            if isinstance(val, tuple):
                node.meta["value"] = tuple(found.get(i) for i in range(len(val)))
                if why:
                    node.meta["irregular"] = tuple(why.get(i) for i in range(len(val)))
            elif found:
                node.meta["value"] = found[0]
                if why:
                    node.meta["irregular"] = why[0]

    def fate(self, node: Node, at: int, tensor: Tensor) -> Fate:
        """How the rows of one result lie, or why that is not proved."""
        sizes = sizes_of(tensor, self.symbols)
        place = spot(sizes)
        if node.op != "call_function":
            return place.any if isinstance(place, Lay) else place
        if place is None:
            return None
        if node.target is operator.getitem:
            source, item = node.args
            assert isinstance(source, Node) and isinstance(item, int)
            return self.fates[source, item]
        case = Case(node, at, sizes, place, self.entry)
        if isinstance(place, Irregular):
            return crossed(case, place)
        try:
            return prove(case)
        except Irregular as irregular:
            return irregular
        except ZeroDivisionError:  # sizes that no small batch has
            return case.unproved()

    def entry(self, node: Node, argument: str) -> Entry | None:
        """A tensor as an operator's argument, None for a number."""
        if is_number(node):
            return None
        return Entry(node, argument, sizes_of(node.meta["val"], self.symbols), self.fates[node, 0])


def value_of(node: Node, tensor: Tensor, sizes: tuple[sympy.Expr, ...], fate: Fate) -> Value:
    """The description of a tensor; `shape` is that of one row."""
    rows = None
    if isinstance(fate, Lay):
        segments = min(fate.segments)
        rows = Rows(fate.dim, segments, fate.count // segments)
    elif isinstance(fate, Irregular):
        place = spot(sizes)
        dim = next(d for d, e in enumerate(sizes) if ROWS in e.free_symbols)
        rows = Rows(dim, 1, place.count if isinstance(place, Lay) else 1)
    shape = tuple(size_of_a_row(e) for e in sizes)
    name = node.meta["name"] if "role" in node.meta else node.name
    dtype = str(tensor.dtype).removeprefix("torch.")
    floating = has_gradients(tensor.dtype)
    return Value(name, shape, dtype, rows, floating and bool(node.meta["differentiable"]))


def size_of_a_row(size: sympy.Expr) -> int:
    """The size for a batch of one row; a share of many rows' where one row is too few for it."""
    try:
        return int(size.subs({ROWS: 1}))
    except ZeroDivisionError:
        return max(1, int(size.subs({ROWS: MANY})) // MANY)


def irregular(node: Node, at: int = 0) -> str | None:
    """Why the rows of a tensor may not be taken apart, None where they may."""
    found: str | tuple[str | None, ...] | None = node.meta.get("irregular")
    return found[at] if isinstance(found, tuple) else found
