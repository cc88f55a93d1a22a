"""Embeddings whose gradients have few rows, `nn.Embedding(sparse=True)`.

Local graphs have them with dense gradients, as ranks sum them. Where a position has all of a
gradient, only the rows that a batch has read need to be stepped."""

from collections.abc import Collection
from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from synchromesh.trace.nodes import all_arguments, is_operator, schema

from .local import LocalComponent


def sparse(local: LocalComponent, names: Collection[str]) -> LocalComponent:
    """The component with sparse gradients of the parameters of these names, from embeddings that
    read them."""
    graph, copies = Graph(), dict[Node, Node]()
    first = 2 + len(local.inputs)  # behind the axis and the rows
    given = local.graph.graph.find_nodes(op="placeholder")[first:]
    weights = {node for node, name in zip(given, local.parameters, strict=False) if name in names}
    if not weights:
        return local
    graph.output(graph.graph_copy(local.graph.graph, copies))
    for node, copy in copies.items():
        told = all_arguments(node) if is_operator(node) else {}
        if "sparse" in told and told["weight"] in weights:
            place = [a.name for a in schema(node).arguments].index("sparse")
            copy.args = tuple(True if i == place else a for i, a in enumerate(copy.args))
            if len(copy.args) <= place:
                copy.kwargs = {**copy.kwargs, "sparse": True}
    return replace(local, graph=GraphModule({}, graph))
