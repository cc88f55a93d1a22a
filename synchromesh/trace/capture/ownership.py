"""Ownership: which component each node of the flat graph belongs to.

A node belongs to the component whose module was running; norms join a neighbour; nodes of no
module go with what they read. Nodes that every component may compute for itself belong to none."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import calls, is_random, memory_of
from synchromesh.values.component import Value

from .components import ComponentModule, root_name

Owner = tuple[str, int]  # (path of the component's module, number of the call)
READ_ONLY = ("rows", "leaf", "constant")  # roles of placeholders


@dataclass(frozen=True)
class Ownership:
    """component: index in the chain of every node that is neither free nor folded. free: nodes
    that each component may compute for itself. folded: see `folded_nodes`. merged: why components
    that might stand alone became one, or ""."""

    names: list[str]
    component: dict[Node, int]
    free: set[Node]
    folded: set[Node]
    merged: str


def ownership(
    graph: Graph, model: nn.Module, modules: Sequence[ComponentModule], merge: bool
) -> Ownership:
    """The components of a graph whose values are described. merge: components between which values
    cross whose rows are not known to lie in order become one."""
    free = free_nodes(graph)
    folded = folded_nodes(graph, free)
    running = running_modules(graph, modules, free | folded)
    owners = with_norms_joined(graph, modules, running)
    # a norm that has joined another component does not decide that one's position
    stay = set(owners.values())
    order = [owner for owner in dict.fromkeys(running.values()) if owner in stay] or [("", 0)]
    index: dict[Owner | None, int] = {owner: i for i, owner in enumerate(order)}
    own = {n: index.get(owners.get(n)) for n in calls(graph) if n not in free}
    place_unowned(own)
    component = no_earlier_than_read(own, folded)
    # a component's name: the module's path, and which call of it where there are several
    calls_of = ((path or root_name(model), call) for path, call in order)
    names = [f"{path}@{call}" if call else path for path, call in calls_of]
    merged = keep_effects_together(graph, component, names)
    if merge:
        keep_unordered_rows_together(component)
    component, names = join_without_parameters(component, names)
    return Ownership(names, component, free, folded, merged)


def free_nodes(graph: Graph) -> set[Node]:
    """Nodes that each component may compute for itself: no parameter, chance or effect before."""
    mutated = {name for n in graph.nodes for name in meta.effect(n)}
    free: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            unchanged = meta.role(node) == "buffer" and meta.name(node) not in mutated
            same = meta.role(node) in READ_ONLY or unchanged
        else:
            same = node.op == "call_function" and is_pure(node)
        if same and free.issuperset(node.all_input_nodes):
            free.add(node)
    return free


def is_pure(node: Node) -> bool:
    return not meta.effect(node) and not is_random(node)


def folded_nodes(graph: Graph, free: set[Node]) -> set[Node]:
    """Values that the batch's rows are reduced to, with no parameter on the way. Each component
    computes those it reads from values with rows: of one data block they say too little to cross
    to a component whose blocks are others. What remains is marked `meta.reduced`."""
    folded: set[Node] = set()
    reduced: set[Node] = set()
    for node in filter(is_rowless, calls(graph)):
        inputs = set(node.all_input_nodes)
        with_rows = set(filter(meta.has_rows, inputs))
        if not with_rows and reduced.isdisjoint(inputs):
            continue
        reduced.add(node)
        if node in free:
            continue
        if is_pure(node) and inputs - with_rows - free <= folded:
            folded.add(node)
        else:
            meta.reduced.set(node, True)
    return folded


def is_rowless(node: Node) -> bool:
    """Whether the node makes tensors, and none with rows."""
    values = meta.values_of(node)
    return bool(values) and all(isinstance(v, Value) and v.rows is None for v in values)


def running_modules(
    graph: Graph, modules: Sequence[ComponentModule], without: set[Node]
) -> dict[Node, Owner]:
    """The innermost component module that was running, for the other nodes."""
    paths = {m.path for m in modules}
    running: dict[Node, Owner] = {}
    for node in calls(graph):
        if node not in without:
            inside = [owner for owner in meta.owner(node) if owner[0] in paths]
            if inside:
                running[node] = inside[-1]
    return running


def with_norms_joined(
    graph: Graph, modules: Sequence[ComponentModule], owners: dict[Node, Owner]
) -> dict[Node, Owner]:
    """`owners`, with every norm in the component that it joins."""
    norms = {m.path: m for m in modules if m.norm}
    order = list(dict.fromkeys(owners.values()))
    before: list[Owner] = []
    after = [o for o in order if o[0] not in norms]
    joined = {o: o for o in after}
    for owner in order:
        norm = norms.get(owner[0])
        if norm is None:
            before.append(after.pop(0))
            continue
        left, right = before, after
        if norm.group is not None:
            left, right = of_group(before, after, modules, norm.group)
        elif not norm.batch_norm:
            right = first_reader(graph, owners, owner, set(after)) or after
        nearest = left[::-1] + right if norm.batch_norm else right + left[::-1]
        joined[owner] = nearest[0] if nearest else owner
    return {n: joined[o] for n, o in owners.items()}


def of_group(
    before: list[Owner], after: list[Owner], modules: Sequence[ComponentModule], group: str
) -> tuple[list[Owner], list[Owner]]:
    """The components of a norm's own group, before and behind it; others where it has none."""
    siblings = {m.path for m in modules if m.group == group}
    inside_before = [o for o in before if o[0] in siblings] or before
    inside_after = [o for o in after if o[0] in siblings]
    return inside_before, inside_after or ([] if inside_before else after)


def first_reader(
    graph: Graph, owners: dict[Node, Owner], norm: Owner, candidates: set[Owner]
) -> list[Owner]:
    """The first component that reads what the norm made, directly or through nodes of none."""
    downstream: set[Node] = set()
    for node in calls(graph):
        if owners.get(node) == norm:
            downstream.add(node)
        elif any(a in downstream for a in node.all_input_nodes):
            downstream.add(node)
            if owners.get(node) in candidates:
                return [owners[node]]
    return []


def place_unowned(own: dict[Node, int | None]) -> None:
    """Nodes of no component go with their latest argument, or else with their first reader."""
    for node, at in own.items():
        if at is None:
            above = [a for n in node.all_input_nodes if (a := own.get(n)) is not None]
            own[node] = max(above, default=None)
    for node in reversed(list(own)):
        if own[node] is None:
            below = [b for n in node.users if (b := own.get(n)) is not None]
            own[node] = min(below, default=None)


def no_earlier_than_read(own: dict[Node, int | None], folded: set[Node]) -> dict[Node, int]:
    """The component of every node that is not folded, no earlier than of what it reads."""
    component: dict[Node, int] = {}
    for node, at in own.items():
        read = [component[a] for a in node.all_input_nodes if a in component]
        is_item = node.target is operator.getitem and read
        component[node] = max(read) if is_item or node in folded else max([at or 0, *read])
    return {n: at for n, at in component.items() if n not in folded}


def keep_together(component: dict[Node, int], nodes: Iterable[Node]) -> None:
    """The nodes are in the first of their components, and so is all between."""
    touched = [component[n] for n in nodes if n in component]
    for node, at in component.items():
        if min(touched) < at <= max(touched):
            component[node] = min(touched)


def keep_effects_together(graph: Graph, component: dict[Node, int], names: list[str]) -> str:
    """All nodes that touch a buffer that changes are in one component, also through views of it
    and what a change gave. Returns why components became one, or ""."""
    merged = ""
    changed = {name for n in graph.nodes for name in meta.effect(n)}
    touching: dict[Node, list[Node]] = {}
    for node in component:
        for read in node.all_input_nodes:
            touching.setdefault(memory_of(read), []).append(node)
    for buffer in meta.placeholders(graph, "buffer"):
        if meta.name(buffer) in changed:
            places = {component[n] for n in touching[buffer]}
            if len(places) > 1:
                merged = (
                    f"the buffer {meta.name(buffer)}, which changes, is used in "
                    f"{names[min(places)]} and in {names[max(places)]}: all between stays together"
                )
            keep_together(component, touching[buffer])
    return merged


def keep_unordered_rows_together(component: dict[Node, int]) -> None:
    """Whoever reads a value whose rows lie in no known order is in the component that makes it."""
    for node in component:
        if not any(meta.why_irregular(node, at) for at, _ in meta.tensors(node)):
            continue
        readers, stack = {node}, [node]
        while stack:  # through copies that components make for themselves
            for user in stack.pop().users:
                if user not in readers and user.op == "call_function":
                    readers.add(user)
                    if user not in component:
                        stack.append(user)
        keep_together(component, readers)


def join_without_parameters(
    component: dict[Node, int], names: list[str]
) -> tuple[dict[Node, int], list[str]]:
    """Components without a parameter join the one before (the first ones: the one after)."""
    roles = ((i, map(meta.role, n.all_input_nodes)) for n, i in component.items())
    kept = sorted({i for i, of_inputs in roles if "parameter" in of_inputs}) or [0]
    joined = [max((r for r in kept if r <= i), default=kept[0]) for i in range(len(names))]
    place = {r: k for k, r in enumerate(kept)}
    return {n: place[joined[i]] for n, i in component.items()}, [names[r] for r in kept]
