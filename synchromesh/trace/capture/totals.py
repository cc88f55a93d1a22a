"""Totals: sums over all rows of a global batch that no parameter enters, known before it is run.

    cross_entropy(a, y) + mse_loss(b, z)              a mean over targets and one over rows
    (each * mask).sum() / mask.sum().clamp(min=1)     a function of a total
    (each * w / w.sum()).sum(),  x - x.mean(0)        rows joined with a total

They become leaves of the batch, the same for all its rows. What remains of such losses is affine
in sums S and means M over rows, so that with S n / m for the sum of a block of m of n rows the
mean of the blocks' losses, weighted by rows, is the loss:

    sum_b m_b / n  L(S_b n / m_b, M_b)  =  L(sum_b S_b, sum_b m_b / n M_b)"""

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import ancestors, calls, short_name
from synchromesh.values.component import Value

from .coupling import coupling_operators
from .loss_reduction import WEIGHTED, LossReduction, ReductionAnalysis, aten, reduce_to_sums
from .ownership import free_nodes


def with_loss_reduced(
    graph: Graph, count: int, reports: Sequence[str] = ()
) -> tuple[Graph, LossReduction, Graph | None]:
    """The step with its loss, the first `count` outputs, as a mean or a pair of sums; where rows
    stay together without, with totals as leaves, and the graph of those of a block. reports: the
    names of the outputs behind it."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    reduction = reduce_to_sums(graph, count, reports)
    if not reduction.doubt and not any(coupling_operators(graph)):
        return graph, reduction, None
    write_fractions(copy)
    summed = dict(sums_of_batch(copy))
    totals = graph_of(copy, summed)
    with_totals = reduce_to_sums(copy, count, reports, replace_by_leaves(copy, summed))
    if with_totals.doubt or any(coupling_operators(copy)):
        return graph, reduction, None
    return copy, with_totals, totals


def names(count: int) -> tuple[str, ...]:
    """The names of so many totals as leaves, of which the last is the number of rows."""
    return tuple(f"totals.{at}" for at in range(count))


def write_fractions(graph: Graph) -> None:
    """Every mean over targets as the fraction of two sums that it is."""
    analysis = ReductionAnalysis(graph)
    for node in calls(graph):
        if short_name(node) in WEIGHTED and meta.val(node).dtype is not torch.float16:
            reduction = analysis.known_reduction(node)
            if reduction is not None and reduction.sums is not None:
                with graph.inserting_before(node):
                    fraction = analysis.add(node, aten.div.Tensor, *reduction.sums())
                node.replace_all_uses_with(fraction)


def sums_of_batch(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Operators that reduce rows of the batch alone, which are apart, and how."""
    free, analysis = free_nodes(graph), ReductionAnalysis(graph)
    coupled = dict(coupling_operators(graph)).keys()
    for node in calls(graph):
        if node not in free or not reduces_rows(node) or meta.reported(node):
            continue
        reduction, made_of = analysis.known_reduction(node), ancestors(node)
        apart = coupled.isdisjoint(made_of) and "buffer" not in map(meta.role, made_of)
        if apart and reduction is not None and reduction.kind in ("sum", "mean"):
            yield node, reduction.kind


def reduces_rows(node: Node) -> bool:
    """Whether more than an output reads real numbers that the node makes of values with rows."""
    value = meta.value(node)
    if not isinstance(value, Value) or value.rows is not None:
        return False
    is_read = any(user.op != "output" for user in node.users)
    real = not value.dtype.startswith("complex")
    return real and is_read and any(map(meta.has_rows, node.all_input_nodes))


def graph_of(graph: Graph, summed: Mapping[Node, str]) -> Graph:
    """The graph of the sums over a block of rows, and of their number: a mean as a sum, too."""
    made, needed = Graph(), ancestors(*summed)
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node in needed or meta.role(node) == "rows":
            copies[node] = made.node_copy(node, copies.__getitem__)
    (rows,) = meta.placeholders(made, "rows")
    sums = [
        made.call_function(operator.mul, (copies[node], rows)) if kind == "mean" else copies[node]
        for node, kind in summed.items()
    ]
    made.output((*sums, made.call_function(torch.tensor, (rows,))))
    return made


def replace_by_leaves(graph: Graph, summed: Mapping[Node, str]) -> Node:
    """Puts leaves in the place of sums; returns that of the number of rows."""
    analysis, (rows,) = ReductionAnalysis(graph), meta.placeholders(graph, "rows")
    (like, *_), output = meta.placeholders(graph, "leaf"), graph.output_node()
    vals = [*map(meta.val, summed), meta.val(like).new_empty((), dtype=torch.int64)]
    with graph.inserting_after(rows):
        leaves = [leaf(graph, *each) for each in zip(names(len(vals)), vals, strict=True)]
    for (node, kind), total in zip(summed.items(), leaves, strict=False):
        if kind == "mean":
            with graph.inserting_before(node):
                total = analysis.add(node, aten.div.Tensor, total, leaves[-1])
        node.replace_all_uses_with(total, lambda user: user is not output)
    return leaves[-1]


def leaf(graph: Graph, name: str, val: Tensor) -> Node:
    """A leaf of the batch without rows."""
    node = graph.placeholder(name.replace(".", "_"))
    meta.describe(node, val, (), False)
    meta.role.set(node, "leaf")
    meta.name.set(node, name)
    dtype = str(val.dtype).removeprefix("torch.")
    meta.value.set(node, Value(name, tuple(val.shape), dtype, None, False))
    return node
