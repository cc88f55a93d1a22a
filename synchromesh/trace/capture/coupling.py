"""Coupling: where the rows of a batch depend on each other in a step, so that data blocks that do
not see each other compute something else.

Batch norm is left out: the engine decides over which rows its statistics are taken.
"""

import torch
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import calls, described, living, short_name
from synchromesh.trace.rules.elementwise import FILLING


def coupled(graph: Graph) -> str | None:
    """A clause that names the first operator that couples rows, and the user's line; else None.

    Said of values of rows x rows, of operators that work along the rows, and where a value that
    rows were reduced to meets rows again. A loss's own mean, or sum / weight, meets none.
    """
    live = living(graph)
    reduced: set[Node] = set()
    for node in calls(graph):
        if node not in live or meta.value(node) is None:
            continue
        if rows_twice(node):
            return f"{described(node)} makes a value of rows x rows"
        if meta.coupling(node):
            return meta.coupling(node)
        content = [] if fills(node) else node.all_input_nodes
        reads_reduced = any(a in reduced for a in content)
        if meta.has_rows(node):
            if reads_reduced:
                return f"{described(node)} joins rows with a value that rows were reduced to"
        elif reads_reduced or any(map(meta.has_rows, content)):
            reduced.add(node)
    return None


def fills(node: Node) -> bool:
    """Whether the node reads no more than the shape of its arguments."""
    name = short_name(node)
    return name in FILLING or name.startswith("new_") or name.endswith("_like")


def rows_twice(node: Node) -> bool:
    """Whether a tensor that the node makes has two dimensions that grow with the rows."""
    shapes = (x.shape for _, x in meta.tensors(node))
    return any(sum(isinstance(n, torch.SymInt) for n in shape) > 1 for shape in shapes)
