"""The program of a rank without rows: a row that is not its own keeps it in step with the others.

Every rank of a component runs the same operators, and so the same collectives in the same order.
Where the batch has no row for a rank, it runs on another rank's row, and nothing that comes of it
leaves the rank: every gradient of what the row was computed with is exactly zero, whatever the row
made of it (zero times not-a-number would not be), and buffers that rows change are copies.

    parameters, buffers --> operators without rows --> values that hold for all rows
           |                                                |
         [stop]                                           [stop]       backward gives zeros
           v                                                v
    rows --[stop]--> operators with rows --> rows, loss, buffers: not this rank's to tell

Values that no row enters (a table of positions) are the rank's own, and so are their gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from synchromesh.trace import meta

Node = torch.fx.Node
RUNNING = slice(4, 6)  # arguments of axis.batch_norm: it minds itself that the rows are not real


class _StopGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.zeros_like(gradient)


def stop_gradient(x: Tensor) -> Tensor:
    """`x`, through which a gradient of exactly zero flows back."""
    return _StopGradient.apply(x) if x.requires_grad and torch.is_grad_enabled() else x


def isolated(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The local graph for a rank without rows; its placeholders say what they are (`meta`)."""
    made = torch.fx.Graph()
    rows = row_nodes(graph.graph)
    stopped: dict[Node, Node] = {}
    copies: dict[Node, Node] = {}

    def outside(node: Node) -> Node:
        if node.name == "axis":
            return copies[node]
        if node not in stopped:
            target = torch.clone if meta.is_buffer(node) else stop_gradient
            stopped[node] = made.call_function(target, (copies[node],))
        return stopped[node]

    for node in graph.graph.nodes:
        if node in rows and node.op in ("call_function", "call_method"):
            norm = node.op == "call_method" and node.target == "batch_norm"
            own = set(node.args[RUNNING]) if norm else set()
            copies[node] = made.node_copy(
                node,
                lambda a, own=own: copies[a] if a in rows or a in own else outside(a),  # type: ignore[misc]
            )
        else:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node in rows and node.op == "placeholder" and node.name != "rows":
                copies[node] = made.call_function(stop_gradient, (copies[node],))
    made.lint()
    return torch.fx.GraphModule({}, made)


def row_nodes(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that a row, or the number of rows, enters."""
    nodes: set[Node] = set()
    for node in graph.nodes:
        of_rows = node.op == "placeholder" and meta.of_rows(node)
        if of_rows or any(a in nodes for a in node.all_input_nodes):
            nodes.add(node)
    return nodes
