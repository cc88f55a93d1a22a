"""The split of the flat graph into components: the graph grouped by them, the chain, its edges."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import Reference, ancestors, calls, living, outputs
from synchromesh.values.component import Chain, Component, Edge, Parameter, Value

from .components import ComponentModule
from .export import Untraceable
from .known_values import is_fake
from .ownership import Ownership, ownership


class UnorderedRows(Untraceable):
    """A value crosses whose rows are not known to lie in order."""


def split(
    graph: Graph, model: nn.Module, modules: Sequence[ComponentModule],
    constants: dict[str, Tensor], merge: bool = False,
) -> tuple[Graph, Chain, str]:  # fmt: skip
    """A new graph, grouped by component, its chain, and why components that might stand alone are
    one, or "". Every call gets `meta.component`. merge: components between which values cross
    whose rows are not known to lie in order become one; else that raises `UnorderedRows`."""
    owned = ownership(graph, model, modules, merge)
    graph = regroup(graph, owned)
    chain = Chain(components(graph, owned.names, constants), edges(graph, owned.names))
    return graph, chain, owned.merged


def regroup(graph: Graph, owned: Ownership) -> Graph:
    """A copy in the order of the components, each with its own copies of free and folded nodes.
    Outputs are the last component's, but for a carry and reports, which stay where they are made.
    """
    live, new = living(graph), Graph()
    copied = {
        node: new.node_copy(node)
        for node in graph.find_nodes(op="placeholder")
        if node in live or meta.role(node) == "rows"
    }
    last = len(owned.names) - 1
    local: dict[Node, Node] = {}  # a component's copies of free and folded nodes
    for at, own in enumerate(living_groups(graph, owned, live)):
        read = [a for n in own for a in n.all_input_nodes]
        read += outputs(graph) if at == last else ()
        local = {}
        for node in with_copies(graph, own, read, owned):
            copy = new.node_copy(node, lambda a, c=local: c.get(a) or copied[a])  # type: ignore[misc]
            meta.component.set(copy, at)
            rename_value(copy)
            (copied if node in owned.component else local)[node] = copy
    results = [local.get(n) or copied[n] for n in outputs(graph)]
    new.output(tuple(r if ends_chain(r, last) else copy_out(new, r, last) for r in results))
    return new


def living_groups(graph: Graph, owned: Ownership, live: set[Node]) -> list[list[Node]]:
    groups: list[list[Node]] = [[] for _ in owned.names]
    for node in calls(graph):
        if node in owned.component and node in live:
            groups[owned.component[node]].append(node)
    return groups


def with_copies(
    graph: Graph, own: Iterable[Node], read: Iterable[Node], owned: Ownership
) -> list[Node]:
    """A component's nodes in their order, with the free and folded ones for what it reads."""
    copied = owned.free | owned.folded
    needed = ancestors(*read, among=lambda n: n in copied and n.op == "call_function")
    free = needed & owned.free
    rest = (needed - free).union(own)
    order = calls(graph)
    return [n for n in order if n in free] + [n for n in order if n in rest]


def ends_chain(result: Node, last: int) -> bool:
    """Whether an output stays where it is made: in the last component; with rows, or where it is
    reported, in any."""
    anywhere = meta.reported(result) or meta.has_rows(result)
    return (anywhere and result.op == "call_function") or meta.component(result) == last


def rename_value(node: Node) -> None:
    """Values are known by their nodes' names."""
    value = meta.value(node)
    if isinstance(value, Value):
        meta.value.set(node, replace(value, name=node.name))


def copy_out(graph: Graph, source: Node, last: int) -> Node:
    """What an earlier component, or the batch, made is copied in the last one."""
    node = graph.call_function(torch.ops.aten.clone.default, (source,))
    meta.copy(source, node)
    meta.component.set(node, last)
    rename_value(node)
    return node


def edges(graph: Graph, names: list[str]) -> tuple[Edge, ...]:
    """Leaves of the batch that components read, and values that cross from one to later ones."""
    for node in filter(meta.why_irregular, outputs(graph)):
        raise UnorderedRows(
            f"the carry {node.name} {meta.why_irregular(node)}: its rows must lie as those of the "
            "batch"
        )
    crossing = []
    for node in graph.nodes:
        at, value = meta.component(node), meta.value(node)
        readers = {meta.component(user) for user in node.users if user.op == "call_function"}
        targets = sorted(readers - {at})
        if not targets or not (node.op == "call_function" or meta.role(node) == "leaf"):
            continue
        if why := meta.why_irregular(node) if isinstance(value, Value) else "is not a tensor":
            raise UnorderedRows(
                f"the value {node.name} between the components {names[max(at, 0)]} and "
                f"{names[targets[0]]} {why}: they stay together, unless rows are kept apart and "
                "in order along one dimension"
            )
        source = None if at < 0 else names[at]
        crossing.append(Edge(value, source, tuple(names[t] for t in targets)))
    return tuple(crossing)


def components(
    graph: Graph, names: list[str], constants: dict[str, Tensor]
) -> tuple[Component, ...]:
    """The components by name, with their tensors and structure."""
    groups: list[list[Node]] = [[] for _ in names]
    for node in calls(graph):
        groups[meta.component(node)].append(node)
    made = []
    for name, group in zip(names, groups, strict=True):
        parameters, buffers = (tuple(tensors_read(group, x)) for x in ("parameter", "buffer"))
        made.append(Component(name, parameters, buffers, structure(group, constants)))
    return tuple(made)


def tensors_read(group: list[Node], role: str) -> Iterable[Parameter]:
    for node in dict.fromkeys(a for n in group for a in n.all_input_nodes if meta.role(a) == role):
        v = meta.value(node)
        yield Parameter(meta.name(node), v.shape, v.dtype, v.differentiable, role == "buffer")


def structure(group: list[Node], constants: dict[str, Tensor]) -> str:
    """A key of what the component computes: operators, wiring, shapes and types, but no names."""
    number: dict[Node, str] = {}
    lines: list[str] = []
    inside = set(group)

    def refer(node: Node) -> str:
        if node not in number:  # read for the first time: an input, by role, shape and type
            number[node] = f"i{len(number)}"
            role, v = meta.role(node) or "value", meta.value(node)
            kind = (v.shape, v.dtype, v.rows, v.differentiable) if isinstance(v, Value) else None
            content = content_key(constants[meta.name(node)]) if role == "constant" else ""
            lines.append(f"{number[node]} {role} {kind} {content}")
        return number[node]

    for node in group:
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: Reference(refer(n)))
        number[node] = f"n{len(number)}"
        leaves_it = any(u not in inside for u in node.users)
        effect = bool(meta.effect(node))
        lines.append(f"{number[node]} {node.target} {args} {effect} {leaves_it}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def content_key(tensor: Tensor) -> str:
    """A key of a constant's entries, whatever their type."""
    if is_fake(tensor):
        return "unknown"
    return hashlib.sha256(str(tensor.detach().cpu().tolist()).encode()).hexdigest()[:16]
