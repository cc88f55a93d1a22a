"""The cut: every node of the flat graph gets its component; the chain of components and edges."""

import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.values.component import Chain, Component, Edge, Parameter, Value

from .components import Piece, root_name
from .export import Untraceable
from .lay import results
from .nodes import behind, is_random
from .rows import irregular

Node = torch.fx.Node
Owner = tuple[str, int]  # (path of the piece, number of the call)
ONLY_READ = ("rows", "leaf", "constant")


class Scattered(Untraceable):
    """A value crosses whose rows are not known to lie in order."""


def split(
    graph: torch.fx.Graph,
    model: nn.Module,
    pieces: tuple[Piece, ...],
    constants: dict[str, Tensor],
    merge: bool = False,
) -> tuple[torch.fx.Graph, Chain]:
    """A new graph, grouped by component, and its chain. Every node gets `meta["component"]`.

    merge: components between which values cross whose rows are not known to lie in order become
    one; else such a value is `Scattered`.
    """
    free = free_nodes(graph)
    folded = folds(graph, free)
    component, names = assign(graph, model, pieces, free, folded, merge)
    graph = regroup(graph, component, free, folded, len(names))
    return graph, Chain(describe(graph, names, constants), edges(graph, names))


# -- which component a node belongs to ---------------------------------------------------


def free_nodes(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that each component may compute for itself: no parameter, chance or effect before."""
    mutated = {name for n in graph.nodes for name in n.meta.get("effect", ())}
    free: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            role = node.meta["role"]
            ok = role in ONLY_READ or (role == "buffer" and node.meta["name"] not in mutated)
        else:
            ok = node.op == "call_function" and "effect" not in node.meta and not is_random(node)
        if ok and all(a in free for a in node.all_input_nodes):
            free.add(node)
    return free


def folds(graph: torch.fx.Graph, free: set[Node]) -> set[Node]:
    """Values that the batch's rows are reduced to, with no parameter on the way.

    Each component computes those it reads from values with rows: of one data block they say too
    little, so that they may not cross to a component whose blocks are others. What remains has
    `meta["reduced"]`.
    """
    found: set[Node] = set()
    reduced: set[Node] = set()
    for node in calls(graph):
        values = node.meta.get("value")
        each = values if isinstance(values, tuple) else (values,)
        rowless = all(isinstance(v, Value) and v.rows is None for v in each)
        below = [a for a in node.all_input_nodes if a in reduced or has_rows(a)]
        if not rowless or not below:
            continue
        reduced.add(node)
        if node in free:
            continue
        plain = all(a in free or a in found or has_rows(a) for a in node.all_input_nodes)
        if plain and "effect" not in node.meta and not is_random(node):
            found.add(node)
        else:
            node.meta["reduced"] = True
    return found


def has_rows(node: Node) -> bool:
    values = node.meta.get("value")
    each = values if isinstance(values, tuple) else (values,)
    return any(isinstance(v, Value) and v.rows is not None for v in each)


def calls(graph: torch.fx.Graph) -> list[Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def owners(graph: torch.fx.Graph, pieces: tuple[Piece, ...], free: set[Node]) -> dict[Node, Owner]:
    """The piece whose module was running, for each node that is not free."""
    paths = {p.path for p in pieces}
    found: dict[Node, Owner] = {}
    for node in calls(graph):
        if node in free:
            continue
        for path, call in reversed(node.meta["owner"]):
            if path in paths:
                found[node] = (path, call)
                break
    return found


def joined(
    graph: torch.fx.Graph, pieces: tuple[Piece, ...], found: dict[Node, Owner]
) -> dict[Node, Owner]:
    """`found`, with every norm in the piece that it joins."""
    by_path = {p.path: p for p in pieces}
    order = list(dict.fromkeys(o for n in graph.nodes if (o := found.get(n))))
    target: dict[Owner, Owner] = {}
    for at, norm in enumerate(order):
        me = by_path[norm[0]]
        if not me.norm:
            continue
        before = [o for o in order[:at] if not by_path[o[0]].norm]
        after = [o for o in order[at + 1 :] if not by_path[o[0]].norm]
        if me.group is not None:
            siblings = {p.path for p in pieces if p.group == me.group}
            before = [o for o in before if o[0] in siblings] or before
            after = [o for o in after if o[0] in siblings] or (after if not before else [])
        elif not me.batch_norm:
            fed = feeds(graph, found, norm, set(after))
            after = [fed] if fed else after
        choice = before[::-1] + after if me.batch_norm else after + before[::-1]
        target[norm] = choice[0] if choice else norm
    return {n: target.get(o, o) for n, o in found.items()}


def feeds(
    graph: torch.fx.Graph, found: dict[Node, Owner], norm: Owner, candidates: set[Owner]
) -> Owner | None:
    """The first piece that reads what the norm made, directly or through nodes of no piece."""
    downstream: set[Node] = set()
    for node in calls(graph):
        if found.get(node) == norm:
            downstream.add(node)
        elif any(a in downstream for a in node.all_input_nodes):
            downstream.add(node)
            if found.get(node) in candidates:
                return found[node]
    return None


def assign(
    graph: torch.fx.Graph,
    model: nn.Module,
    pieces: tuple[Piece, ...],
    free: set[Node],
    folded: set[Node],
    merge: bool,
) -> tuple[dict[Node, int], list[str]]:
    """Component index of every node that is neither free nor folded, and the components' names."""
    own = owners(graph, pieces, free | folded)
    found = joined(graph, pieces, own)
    stay = set(
        found.values()
    )  # a norm that has joined another piece does not decide that one's position
    order = [o for o in dict.fromkeys(own[n] for n in graph.nodes if n in own) if o in stay] or [
        ("", 0)
    ]
    index = {o: i for i, o in enumerate(order)}
    mine = {n: index.get(found[n]) if n in found else None for n in calls(graph) if n not in free}
    place_unowned(graph, mine)
    component: dict[Node, int] = {}
    for node, at in mine.items():
        above = [component[a] for a in node.all_input_nodes if a in component]
        item = node.target is operator.getitem  # a tuple's items stay where the tuple is made
        pinned = (item and above) or node in folded  # folded: no earlier than what it reads
        component[node] = max(above) if pinned else max([at or 0, *above])
    component = {n: at for n, at in component.items() if n not in folded}
    keep_effects_together(graph, component)
    if merge:
        keep_scattered_together(component)
    return merge_bare(graph, component, [name_of(o, model) for o in order])


def place_unowned(graph: torch.fx.Graph, mine: dict[Node, int | None]) -> None:
    """Nodes of no piece go with their latest argument, or else with their first reader."""
    for node, at in mine.items():
        if at is None:
            above = [a for n in node.all_input_nodes if (a := mine.get(n)) is not None]
            mine[node] = max(above, default=None)
    for node in reversed(list(mine)):
        if mine[node] is None:
            below = [b for n in node.users if (b := mine.get(n)) is not None]
            mine[node] = min(below, default=None)


def keep_effects_together(graph: torch.fx.Graph, component: dict[Node, int]) -> None:
    """All nodes that touch a buffer that changes are in one component, and all between."""
    changed = {name for n in graph.nodes for name in n.meta.get("effect", ())}
    for holder in graph.find_nodes(op="placeholder"):
        if holder.meta["role"] != "buffer" or holder.meta["name"] not in changed:
            continue
        touched = [component[n] for n in holder.users if n in component]
        for node, at in component.items():
            if min(touched) < at <= max(touched):
                component[node] = min(touched)


def keep_scattered_together(component: dict[Node, int]) -> None:
    """Whoever reads a value whose rows lie in no known order is in the component that makes it,
    and so is all between."""
    for node in component:
        if not any(irregular(node, at) for at, _ in results(node)):
            continue
        readers, stack = {node}, [node]
        while stack:  # through copies that components make for themselves
            for user in stack.pop().users:
                if user not in readers and user.op == "call_function":
                    readers.add(user)
                    if user not in component:
                        stack.append(user)
        touched = [component[n] for n in readers if n in component]
        for other, at in component.items():
            if min(touched) < at <= max(touched):
                component[other] = min(touched)


def name_of(owner: Owner, model: nn.Module) -> str:
    path, call = owner
    return (path or root_name(model)) + (f"@{call}" if call else "")


def merge_bare(
    graph: torch.fx.Graph, component: dict[Node, int], names: list[str]
) -> tuple[dict[Node, int], list[str]]:
    """Components without a parameter join the one before (the first ones: the one after)."""
    rich = sorted(
        {
            i
            for n, i in component.items()
            if any(a.meta.get("role") == "parameter" for a in n.all_input_nodes)
        }
    ) or [0]
    new = {i: max((r for r in rich if r <= i), default=rich[0]) for i in range(len(names))}
    place = {r: k for k, r in enumerate(rich)}
    return {n: place[new[i]] for n, i in component.items()}, [names[r] for r in rich]


# -- the graph, grouped by component -----------------------------------------------------


def regroup(
    graph: torch.fx.Graph,
    component: dict[Node, int],
    free: set[Node],
    folded: set[Node],
    count: int,
) -> torch.fx.Graph:
    """A copy in the order of the components, each with its own copies of free and folded nodes."""
    (output,) = graph.find_nodes(op="output")
    last = count - 1
    live = living(graph)
    new = torch.fx.Graph()
    env: dict[Node, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in live or node.meta["role"] == "rows":
            env[node] = new.node_copy(node)
    groups: list[list[Node]] = [[] for _ in range(count)]
    for node in calls(graph):
        if node in component and node in live:
            groups[component[node]].append(node)
    for at, group in enumerate(groups):
        reads = [a for n in group for a in n.all_input_nodes]
        reads += output.all_input_nodes if at == last else []
        copies: dict[Node, Node] = {}  # of free nodes, for this component alone
        needed = needed_free(reads, free | folded)
        mine = set(group)
        order = [n for n in calls(graph) if n in needed and n in free]  # masks and the like first
        order += [n for n in calls(graph) if n in mine or (n in needed and n in folded)]
        for node in order:
            copied = new.node_copy(node, lambda a, c=copies: c.get(a) or env[a])  # type: ignore[misc]
            copied.meta["component"] = at
            rename(copied)
            (env if node in mine else copies)[node] = copied
    results = []
    for node in output.args[0]:
        source = copies.get(node) or env[node]
        if source.meta.get("component") != last:
            source = copy_out(new, source, last)
        results.append(source)
    new.output(tuple(results))
    return new


def living(graph: torch.fx.Graph) -> set[Node]:
    """Nodes that an output or an effect needs."""
    return behind(*(n for n in graph.nodes if n.op == "output" or "effect" in n.meta))


def needed_free(reads: list[Node], free: set[Node]) -> set[Node]:
    """The free nodes behind what a component reads."""
    needed: set[Node] = set()
    stack = [n for n in reads if n in free and n.op == "call_function"]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(a for a in node.all_input_nodes if a.op == "call_function" and a in free)
    return needed


def rename(node: Node) -> None:
    """Values are known by their nodes' names."""
    value = node.meta["value"]
    if isinstance(value, Value):
        node.meta["value"] = Value(
            node.name, value.shape, value.dtype, value.rows, value.differentiable
        )


def copy_out(graph: torch.fx.Graph, source: Node, last: int) -> Node:
    """Outputs come from the last component: what an earlier one (or the batch) made is copied."""
    node = graph.call_function(torch.ops.aten.clone.default, (source,))
    node.meta.update(source.meta, component=last)
    for key in ("role", "name", "effect"):
        node.meta.pop(key, None)
    rename(node)
    return node


# -- the chain ---------------------------------------------------------------------------


def edges(graph: torch.fx.Graph, names: list[str]) -> tuple[Edge, ...]:
    """Leaves of the batch that components read, and values that cross from one to later ones."""
    found = []
    for node in graph.nodes:
        if node.op == "output" or (node.op == "placeholder" and node.meta["role"] != "leaf"):
            continue
        at = node.meta.get("component")
        targets = sorted(
            {u.meta["component"] for u in node.users if u.op == "call_function"} - {at}
        )
        if not targets:
            continue
        tensor = isinstance(node.meta["value"], Value)
        if why := irregular(node) if tensor else "is not a tensor":
            raise Scattered(
                f"the value {node.name} between the components {names[at or 0]} and "
                f"{names[targets[0]]} {why}: they stay together, unless rows are kept apart and "
                "in order along one dimension"
            )
        found.append(
            Edge(
                node.meta["value"],
                None if at is None else names[at],
                tuple(names[t] for t in targets),
            )
        )
    return tuple(found)


def describe(
    graph: torch.fx.Graph, names: list[str], constants: dict[str, Tensor]
) -> tuple[Component, ...]:
    groups: list[list[Node]] = [[] for _ in names]
    for node in calls(graph):
        groups[node.meta["component"]].append(node)
    return tuple(
        Component(
            name=name,
            parameters=tuple(tensors_read(group, "parameter")),
            buffers=tuple(tensors_read(group, "buffer")),
            structure=structure(group, constants),
        )
        for name, group in zip(names, groups, strict=True)
    )


def tensors_read(group: list[Node], role: str) -> Iterable[Parameter]:
    read = dict.fromkeys(a for n in group for a in n.all_input_nodes if a.meta.get("role") == role)
    for node in read:
        value = node.meta["value"]
        yield Parameter(node.meta["name"], value.shape, value.dtype, value.differentiable)


def structure(group: list[Node], constants: dict[str, Tensor]) -> str:
    """A key of what the component computes: operators, wiring, shapes and types, but no names."""
    number: dict[Node, str] = {}
    lines: list[str] = []
    inside = set(group)

    def refer(node: Node) -> str:
        if node not in number:  # read for the first time: an input, told by role, shape and type
            number[node] = f"i{len(number)}"
            role = node.meta.get("role", "value")
            content = digest(constants[node.meta["name"]]) if role == "constant" else ""
            lines.append(f"{number[node]} {role} {shape_of(node)} {content}")
        return number[node]

    for node in group:
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: Reference(refer(n)))
        number[node] = f"n{len(number)}"
        leaves_it = any(u not in inside for u in node.users)
        effect = "effect" in node.meta
        lines.append(f"{number[node]} {node.target} {args} {effect} {leaves_it}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class Reference(str):
    """The number of a node, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def shape_of(node: Node) -> Any:
    value = node.meta.get("value")
    return (
        (value.shape, value.dtype, value.rows, value.differentiable)
        if isinstance(value, Value)
        else None
    )


def digest(tensor: Tensor) -> str:
    if tensor.device.type == "meta" or isinstance(tensor, torch._subclasses.FakeTensor):
        return "unknown"
    return hashlib.sha256(str(tensor.detach().cpu().tolist()).encode()).hexdigest()[:16]
