"""Effects: what a step changes in the model's buffers, and what of that depends on the rows."""

from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import all_arguments, short_name

NORMS = ("batch_norm", "instance_norm")  # whose statistics the engine knows how to combine
TABLES = ("embedding", "embedding_bag")


def normalises_batch(node: Node) -> bool:
    """Whether the node normalises rows by the statistics of all of them."""
    return short_name(node) == "batch_norm" and bool(node.args[5])


def dependent_on_rows(graph: Graph) -> set[Node]:
    """Nodes whose values depend on which rows there are, or on how many."""
    buffers = {meta.name(n): n for n in meta.placeholders(graph, "buffer")}
    found: set[Node] = set(meta.placeholders(graph, "rows"))
    found |= set(filter(meta.has_rows, meta.placeholders(graph, "leaf")))
    before = -1
    while len(found) != before:  # a buffer that rows were written to carries them on
        before = len(found)
        for node in graph.nodes:
            if any(a in found for a in node.all_input_nodes):
                found.add(node)
                if short_name(node) not in NORMS:
                    found |= {buffers[n] for n in meta.effect(node) if n in buffers}
    return found


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


def scales_by_frequency(node: Node) -> bool:
    """Whether gradients depend on how often the batch reads a row of a table: a rank that sees a
    part of the batch counts other numbers."""
    return short_name(node) in TABLES and bool(all_arguments(node)["scale_grad_by_freq"])
