"""Coupling: what of a step depends on the rows of its batch, and where rows depend on each other,
so that data blocks that do not see each other compute something else.

Batch norm is left out: the engine decides over which rows its statistics are taken."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import all_arguments, calls, described, is_number, living, short_name
from synchromesh.trace.rules.elementwise import FILLING

NORMS = ("batch_norm", "instance_norm")  # whose statistics the engine knows how to combine
TABLES = ("embedding", "embedding_bag")


@dataclass(frozen=True)
class Coupling:
    """why: a clause that names the first operator that couples rows, and the user's line.

    components: indices of those that must be computed of all rows of a batch at once.
    doubted: whether no operator is seen to couple rows, but the loss may."""

    why: str = ""
    components: frozenset[int] = frozenset()
    doubted: bool = False


def coupling(graph: Graph, doubt: str = "") -> Coupling:
    """What couples rows in the graph of a step, which is grouped by component. doubt: why the loss
    is not seen to treat rows apart, if so; then the last component needs all rows."""
    operators = dict(coupling_operators(graph))
    if not operators and not doubt:
        return Coupling()
    of_all_rows = {meta.component(node) for node in operators}
    if doubt:
        of_all_rows.add(max(map(meta.component, calls(graph))))
    crossings = [
        {meta.component(node), meta.component(user)}
        for node in filter(meta.reduced, graph.nodes)
        for user in node.users
        if user.op != "output"
    ]
    before = 0
    while len(of_all_rows) != before:  # what rows were reduced to is made and read of the same
        before = len(of_all_rows)
        of_all_rows = of_all_rows.union(*(ends for ends in crossings if ends & of_all_rows))
    ahead_of_masks = *filter(meta.differentiable, operators), *operators
    why = operators[ahead_of_masks[0]] if operators else doubt
    return Coupling(why, frozenset(of_all_rows), not operators)


def coupling_operators(graph: Graph, reports: bool = False) -> Iterator[tuple[Node, str]]:
    """Every operator that couples rows, and a clause that names it and the user's line. These are
    operators that make values of rows x rows, that work along the rows, or that join rows with a
    value that rows were reduced to. A loss's own mean, or sum / weight, joins none. reports:
    whether those count that nothing but what a loss reports needs."""
    live = {n for n in living(graph) if reports or not meta.reported(n)}
    of_rows = dependent_on_rows(graph)
    reduced: set[Node] = set()
    for node in calls(graph):
        if node not in live or meta.value(node) is None:
            continue
        name = short_name(node)
        filled = name in FILLING or name.startswith("new_") or name.endswith("_like")
        content = [] if filled else node.all_input_nodes  # of which not the shape alone is read
        reads_reduced = not reduced.isdisjoint(content)
        reads_rows = any(map(meta.has_rows, content))
        if why := why_coupled(node, reads_reduced and (reads_rows or meta.has_rows(node))):
            yield node, why
        counts = any(is_number(n) for n in of_rows.intersection(content))
        if not meta.has_rows(node) and (reads_reduced or reads_rows or counts):
            reduced.add(node)


def why_coupled(node: Node, joins: bool) -> str:
    """The clause for a node, or "". joins: whether rows meet a value that rows were reduced to."""
    shapes = (x.shape for _, x in meta.tensors(node))
    if any(sum(isinstance(n, torch.SymInt) for n in shape) > 1 for shape in shapes):
        return f"{described(node)} makes a value of rows x rows"
    if meta.coupling(node):
        return meta.coupling(node)
    # a rank that sees a part of the batch counts other numbers
    if short_name(node) in TABLES and all_arguments(node)["scale_grad_by_freq"]:
        why = "scales gradients by how often the batch has an entry (scale_grad_by_freq)"
        return f"{described(node)} {why}"
    if joins and not meta.grouped(node):
        return f"{described(node)} joins rows with a value that rows were reduced to"
    return ""


def normalises_batch(node: Node) -> bool:
    return short_name(node) == "batch_norm" and bool(node.args[5])


def dependent_on_rows(graph: Graph) -> set[Node]:
    """Nodes whose values depend on which rows there are, or on how many."""
    buffers = {meta.name(n): n for n in meta.placeholders(graph, "buffer")}
    dependent: set[Node] = set(meta.placeholders(graph, "rows"))
    dependent |= set(filter(meta.has_rows, meta.placeholders(graph, "leaf")))
    before = -1
    while len(dependent) != before:  # a buffer that rows were written to carries them on
        before = len(dependent)
        for node in graph.nodes:
            if any(a in dependent for a in node.all_input_nodes):
                dependent.add(node)
                if short_name(node) not in NORMS:
                    dependent |= {buffers[n] for n in meta.effect(node) if n in buffers}
    return dependent


def row_dependent_buffers(graph: Graph) -> tuple[str, ...]:
    """Names of the buffers that the step changes by the values of its rows, but for norms'."""
    rows = dependent_on_rows(graph)
    nodes = (n for n in graph.nodes if n in rows and short_name(n) not in NORMS)
    return tuple(dict.fromkeys(name for node in nodes for name in meta.effect(node)))


def settled_buffers(graph: Graph) -> set[str]:
    """Names of the buffers that a step changes to the same whatever its rows, but for norms'."""
    changed = {name for node in graph.nodes for name in meta.effect(node)}
    rows = dependent_on_rows(graph)
    fed = {name for node in graph.nodes if node in rows for name in meta.effect(node)}
    return {n for n in changed - fed if not n.endswith("num_batches_tracked")}
