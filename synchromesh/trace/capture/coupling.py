"""Coupling: where the rows of a batch depend on each other in a step, so that data blocks that do
not see each other compute something else.

Batch norm is not looked at: its statistics are the engine's matter.
"""

import torch
from torch import Tensor

from synchromesh.trace.rules.elementwise import FILLING

from .nodes import line_of, short_name
from .split import calls, has_rows, living

Node = torch.fx.Node


def coupled(graph: torch.fx.Graph) -> str | None:
    """A clause that names the first operator that couples rows, and the user's line; else None.

    Said of values of rows x rows, of operators that work along the rows, and where a value that
    rows were reduced to meets rows again. A loss's own mean, or sum / weight, meets none.
    """
    live = living(graph)
    reduced: set[Node] = set()
    for node in calls(graph):
        if node not in live or node.meta.get("value") is None:
            continue
        name = short_name(node) or getattr(node.target, "__name__", str(node.target))
        where = f"{name} at {line_of(node)}"
        if rows_twice(node):
            return f"{where} makes a value of rows x rows"
        if "mixed" in node.meta:
            return str(node.meta["mixed"])
        content = [] if fills(node) else node.all_input_nodes
        below = [a for a in content if a in reduced]
        if has_rows(node):
            if below:
                return f"{where} joins rows with a value that rows were reduced to"
        elif below or any(has_rows(a) for a in content):
            reduced.add(node)
    return None


def fills(node: Node) -> bool:
    """Whether the node reads no more than the shape of its arguments."""
    name = short_name(node)
    return name in FILLING or name.startswith("new_") or name.endswith("_like")


def rows_twice(node: Node) -> bool:
    """Whether a tensor that the node makes has two dimensions that grow with the rows."""
    val = node.meta.get("val")
    tensors = val if isinstance(val, tuple) else (val,)
    return any(
        sum(isinstance(size, torch.SymInt) for size in t.shape) > 1
        for t in tensors
        if isinstance(t, Tensor)
    )
