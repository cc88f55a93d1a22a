"""Effects: what a step changes in the model's buffers, and what of that depends on the rows."""

import torch

from .nodes import line_of, short_name

Node = torch.fx.Node
NORMS = ("batch_norm", "instance_norm")  # whose statistics the engine knows how to combine


def norms(node: Node) -> bool:
    """Whether the node normalises rows by the statistics of all of them."""
    return short_name(node) == "batch_norm" and bool(node.args[5])


def dependent_on_rows(graph: torch.fx.Graph) -> set[Node]:
    """Nodes whose values depend on which rows there are, or on how many."""
    buffers = {
        n.meta["name"]: n
        for n in graph.find_nodes(op="placeholder")
        if n.meta.get("role") == "buffer"
    }
    found: set[Node] = set()
    before = -1
    while len(found) != before:  # a buffer that rows were written to carries them on
        before = len(found)
        for node in graph.nodes:
            if node.op == "placeholder":
                leaf = node.meta.get("role") == "leaf" and node.meta["val"].dim() > 0
                if leaf or node.meta.get("role") == "rows":
                    found.add(node)
            elif any(a in found for a in node.all_input_nodes):
                found.add(node)
                if short_name(node) not in NORMS:
                    found |= {buffers[n] for n in node.meta.get("effect", ()) if n in buffers}
    return found


def fed_by_rows(graph: torch.fx.Graph) -> tuple[str, ...]:
    """Names of the buffers that the step changes by the values of its rows, but for norms'."""
    rows = dependent_on_rows(graph)
    return tuple(
        dict.fromkeys(
            name
            for node in graph.nodes
            if node in rows and short_name(node) not in NORMS
            for name in node.meta.get("effect", ())
        )
    )


def counting(graph: torch.fx.Graph) -> str:
    """A sentence about gradients that depend on how often the batch reads a row of a table; empty
    where none does. A rank that sees a part of the batch counts other numbers.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
        given = dict(
            zip(("weight", "indices", "padding_idx", "frequency"), node.args, strict=False)
        )
        if given.get("frequency", node.kwargs.get("scale_grad_by_freq", False)):
            return (
                f"the embedding at {line_of(node)} scales gradients by how often the batch has a "
                "word (scale_grad_by_freq): they will differ between plans that divide rows "
                "differently, so train under a plan without data parallelism"
            )
    return ""
