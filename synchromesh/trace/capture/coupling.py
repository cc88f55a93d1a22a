"""Coupling: where the rows of a batch depend on each other in a step, so that data blocks that do
not see each other compute something else.

Batch norm is left out: the engine decides over which rows its statistics are taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import calls, described, living, short_name
from synchromesh.trace.rules.elementwise import FILLING

from .effects import scales_by_frequency


@dataclass(frozen=True)
class Coupling:
    """why: a clause that names the first operator that couples rows, and the user's line.

    components: indices of those that must be computed of all rows of a batch at once.
    undoable: whether the step may undo it: experts sort rows, count them, and put them back.
    """

    why: str = ""
    components: frozenset[int] = frozenset()
    undoable: bool = False


def coupling(graph: Graph, doubt: str = "") -> Coupling:
    """What couples rows in the graph of a step, which is grouped by component.

    doubt: why the loss is not seen to treat rows apart, if it is not; then the last component,
    which makes the loss, is one of those that need all rows.
    """
    operators = {node: (why, undoable) for node, why, undoable in coupling_operators(graph)}
    if not operators:
        return Coupling()
    found = {meta.component(node) for node in operators}
    if doubt:
        found.add(max(map(meta.component, calls(graph))))
    crossings = [
        {meta.component(node), meta.component(user)}
        for node in graph.nodes
        if meta.reduced(node)
        for user in node.users
        if user.op != "output"
    ]
    before = 0
    while len(found) != before:  # what rows were reduced to is made and read of the same rows
        before = len(found)
        found = found.union(*(ends for ends in crossings if ends & found))
    first = next(filter(meta.differentiable, operators), next(iter(operators)))  # no mask
    undoable = all(undoable for _, undoable in operators.values())
    return Coupling(operators[first][0], frozenset(found), undoable)


def coupling_operators(graph: Graph) -> Iterator[tuple[Node, str, bool]]:
    """Every operator that couples rows, a clause that names it and the user's line, and whether
    others may undo it: it moves or counts rows, and makes no value of rows x rows.

    These are operators that make values of rows x rows, that work along the rows, or that join
    rows with a value that rows were reduced to. A loss's own mean, or sum / weight, joins none.
    """
    live = living(graph)
    reduced: set[Node] = set()
    for node in calls(graph):
        if node not in live or meta.value(node) is None:
            continue
        content = [] if fills(node) else node.all_input_nodes
        read = [a for a in content if a in reduced]
        if why := why_coupled(node, bool(read)):
            moves = meta.coupling(node) or not any(map(meta.differentiable, read))
            yield node, why, bool(moves) and not rows_twice(node) and not scales_by_frequency(node)
        if not meta.has_rows(node) and (read or any(map(meta.has_rows, content))):
            reduced.add(node)


def why_coupled(node: Node, reads_reduced: bool) -> str:
    """The clause for a node, empty where it couples no rows. reads_reduced: whether it reads a
    value that rows were reduced to."""
    if rows_twice(node):
        return f"{described(node)} makes a value of rows x rows"
    if meta.coupling(node):
        return meta.coupling(node)
    if scales_by_frequency(node):
        return (
            f"{described(node)} scales gradients by how often the batch has an entry "
            "(scale_grad_by_freq)"
        )
    if meta.has_rows(node) and reads_reduced:
        return f"{described(node)} joins rows with a value that rows were reduced to"
    return ""


def fills(node: Node) -> bool:
    """Whether the node reads no more than the shape of its arguments."""
    name = short_name(node)
    return name in FILLING or name.startswith("new_") or name.endswith("_like")


def rows_twice(node: Node) -> bool:
    """Whether a tensor that the node makes has two dimensions that grow with the rows."""
    shapes = (x.shape for _, x in meta.tensors(node))
    return any(sum(isinstance(n, torch.SymInt) for n in shape) > 1 for shape in shapes)
