"""What autograd keeps of a local graph for its backward, and so what recomputation repeats."""

from torch.fx import Graph, Node

# Operators of whose inputs and outputs autograd keeps nothing: backward is linear in the gradient.
# A test runs each of them.
KEEP_NOTHING = frozenset(
    {
        "add", "sub", "neg", "alias", "cat", "chunk", "clone", "contiguous", "detach", "expand",
        "flatten", "narrow", "permute", "reshape", "select", "slice", "split", "split_with_sizes",
        "squeeze", "stack", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view",
    }
)  # fmt: skip
MOVES = ("move", "stream")  # methods of the axis of which it keeps nothing either


def repeated(graph: Graph) -> int:
    """How many of a graph's nodes, in their order, are walked again when the component is
    recomputed: all until the last one of which autograd keeps something; 0: none."""
    count = 0
    for i, node in enumerate(graph.nodes, 1):
        if node.op != "output" and _keeps(node):
            count = i
    return count


def _keeps(node: Node) -> bool:
    if node.op == "call_method":
        return node.target not in MOVES
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__module__", "") != "_operator"  # arithmetic of sizes
    return schema.name.partition("::")[2] not in KEEP_NOTHING


def shortened(graph: Graph) -> Graph:
    """The nodes that are walked again, without a result."""
    made, copies = Graph(), dict[Node, Node]()
    for node in list(graph.nodes)[: repeated(graph)]:
        copies[node] = made.node_copy(node, copies.__getitem__)
    for node in graph.nodes:
        if node.op == "placeholder" and node not in copies:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(())
    return made
