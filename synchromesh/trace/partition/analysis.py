"""A component as the partition sees it: its operators, what they read, and every choice each
one has.

Components of equal `signature` compute the same function of other tensors; they are analysed
once, share the variables of the integer program, and come out with equal placements.
"""

import operator
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from synchromesh.trace.capture.rows import irregular
from synchromesh.trace.rules import Choice, Operator, choices, draws
from synchromesh.trace.rules.operator import ROWS, Operand, R, operand
from synchromesh.trace.step import Step
from synchromesh.values.component import Value
from synchromesh.values.placement import Placement, shard

Tensor = tuple[Node, int]  # a node and which of its results


def origin(node: Node) -> Tensor:
    """The tensor that a node stands for: an entry of a tuple is that result of its maker."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        inner = node.args[0]
        if isinstance(inner.meta.get("value"), tuple):
            assert isinstance(node.args[1], int)
            return inner, node.args[1]
    return node, 0


def values_of(node: Node) -> tuple[Value, ...]:
    """The tensors that a node makes."""
    found = node.meta.get("value")
    if found is None:
        return ()
    return found if isinstance(found, tuple) else (found,)


def value_of(tensor: Tensor) -> Value:
    """The tensor's description; an entry of a tuple goes by the name of the node that takes it
    out."""
    node, k = tensor
    if isinstance(node.meta["value"], tuple):
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == k:
                found: Value = user.meta["value"]
                return found
    return values_of(node)[k]


def reads(node: Node) -> list[Tensor]:
    """The tensors a node reads, in call order, a repeated one each time."""
    found: list[Tensor] = []

    def visit(n: Node) -> Node:
        if n.meta.get("value") is not None:
            found.append(origin(n))
        return n

    map_arg((node.args, node.kwargs), visit)
    return found


def operand_of(tensor: Tensor, states: tuple[Placement, ...] = ()) -> Operand:
    """The tensor as rules see it; never sharded where its rows do not lie along one dimension,
    and not behind the rows where their order is not proved."""
    value = value_of(tensor)
    found = replace(operand(value, states), laid=irregular(*tensor) is None)
    val = tensor[0].meta.get("val")
    val = val[tensor[1]] if isinstance(val, list | tuple) else val
    return found if val is None or _sizes(val) == found.shape else replace(found, regular=False)


def _sizes(val: torch.Tensor) -> tuple[int, ...]:
    """The sizes of export's fake tensor with `ROWS` rows."""
    found = []
    for size in val.shape:
        if isinstance(size, torch.SymInt):
            expr = size.node.expr
            found.append(int(expr.subs(dict.fromkeys(expr.free_symbols, ROWS))))
        else:
            found.append(size)
    return tuple(found)


@dataclass(frozen=True)
class Work:
    """One component of a step: its operators in order and the tensors it reads from outside."""

    index: int
    nodes: tuple[Node, ...]
    parameters: tuple[Node, ...]  # placeholders in order of first use
    buffers: tuple[Node, ...]
    constants: tuple[Node, ...]
    borders: tuple[Tensor, ...]  # leaves and values of earlier components in order of first use
    signature: Hashable


@dataclass(frozen=True)
class Flow:
    """Of the whole step: which tensors a gradient flows through, which buffers change, who
    reads what."""

    needs: frozenset[Tensor]  # tensors that a gradient of the outputs reaches
    mutated: frozenset[Node]
    backward: bool


def flow_of(step: Step) -> Flow:
    assert step.graph is not None
    backward = step.outputs in (("loss",), ("sum", "weight"))
    needs: set[Tensor] = set()
    if backward:
        for node in reversed(step.graph.nodes):
            if node.op == "output":
                live = True
            else:
                live = any(
                    (node, i) in needs
                    for i, v in enumerate(values_of(node))
                    if v and v.differentiable
                )
            if live:
                needs |= {
                    t
                    for t in reads(node)
                    if value_of(t) is not None and value_of(t).differentiable
                }
    mutated: set[Node] = set()
    for node in step.graph.nodes:
        if node.op == "call_function" and node.meta.get("effect"):
            mutated |= {n for n, _ in reads(node) if n.meta.get("role") == "buffer"}
    return Flow(frozenset(needs), frozenset(mutated), backward)


def works(step: Step, flow: Flow) -> tuple[Work, ...]:
    """The step's components."""
    assert step.graph is not None
    nodes: list[list[Node]] = [[] for _ in step.chain.components]
    for node in step.graph.nodes:
        if node.op == "call_function" and values_of(node) and origin(node) == (node, 0):
            nodes[node.meta["component"]].append(node)
    return tuple(_work(i, tuple(found), flow) for i, found in enumerate(nodes))


def _work(index: int, nodes: tuple[Node, ...], flow: Flow) -> Work:
    own = set(nodes)
    kinds: dict[str, list[Node]] = {"parameter": [], "buffer": [], "constant": []}
    borders: list[Tensor] = []
    for node in nodes:
        for tensor in reads(node):
            maker = tensor[0]
            role = maker.meta.get("role")
            if role in kinds:
                if maker not in kinds[role]:
                    kinds[role].append(maker)
            elif maker not in own and tensor not in borders:
                borders.append(tensor)
    parameters, buffers, constants = (tuple(kinds[k]) for k in ("parameter", "buffer", "constant"))
    names: dict[Tensor, Hashable] = {(n, 0): ("parameter", i) for i, n in enumerate(parameters)}
    names |= {(n, 0): ("buffer", i, n in flow.mutated) for i, n in enumerate(buffers)}
    names |= {(n, 0): ("constant", i) for i, n in enumerate(constants)}
    names |= {t: ("border", i) for i, t in enumerate(borders)}
    described = [(names[t], _described(t, flow)) for t in names]
    for i, node in enumerate(nodes):
        described.append(
            (str(node.target), repr((_plain(node.args, names), _plain(node.kwargs, names))))
        )
        for k in range(len(values_of(node))):
            names[node, k] = ("result", i, k)
            described.append((names[node, k], _described((node, k), flow)))
    return Work(index, nodes, parameters, buffers, constants, tuple(borders), tuple(described))


def _described(tensor: Tensor, flow: Flow) -> Hashable:
    v = value_of(tensor)
    return (
        None
        if v is None
        else (
            v.shape,
            v.dtype,
            v.rows,
            v.differentiable,
            tensor in flow.needs,
            irregular(*tensor) is None,
        )
    )


def _plain(x: Any, names: dict[Tensor, Hashable]) -> Any:
    """Arguments with tensors by local name and integers by how they are computed."""
    if isinstance(x, Node):
        if values_of(x):
            return names[origin(x)]
        return (str(x.target), _plain(x.args, names))
    if isinstance(x, list | tuple):
        return tuple(_plain(y, names) for y in x)
    if isinstance(x, dict):
        return tuple((k, _plain(v, names)) for k, v in x.items())
    return repr(x)


@dataclass(frozen=True)
class Menu:
    """Every choice of every operator of a component on m ranks, and the operators."""

    choices: tuple[tuple[Choice, ...], ...]
    operators: tuple[Operator, ...]


def menu(work: Work, m: int) -> Menu:
    """The choices of a component's operators.

    Sharding in segments (a fused q-k-v weight) is found by passing the states that one operator
    asks for on to its neighbours, forwards and backwards, until nothing is new.
    """
    states: dict[Tensor, set[Placement]] = {}
    own = set(work.nodes)

    def described(tensor: Tensor) -> Operand:
        if tensor not in states:
            bare = operand_of(tensor)
            found = (shard(d) for d in range(len(bare.shape))) if m > 1 else ()
            states[tensor] = {s for s in found if bare.allows(s, m)}
        known = operand_of(tensor, tuple(sorted(states[tensor])))
        return known if tensor[0] in own else replace(known, border=True)

    def look(node: Node) -> Operator:
        def of(n: Node) -> Operand | None:
            return described(origin(n)) if n.meta.get("value") is not None else None

        made = tuple(described((node, i)) for i in range(len(values_of(node))))
        return Operator(node, m, of, made)

    derived = plain_nodes(work)
    found: list[tuple[Choice, ...]] = [()] * len(work.nodes)
    operators: list[Operator] = [look(n) for n in work.nodes]
    dirty = set(range(len(work.nodes)))
    users: dict[Tensor, list[int]] = {}
    for i, node in enumerate(work.nodes):
        for t in {*reads(node), *((node, k) for k in range(len(values_of(node))))}:
            users.setdefault(t, []).append(i)
    for turn in range(20):
        order = sorted(dirty, reverse=bool(turn % 2))
        dirty = set()
        for i in order:
            dirty.discard(i)
            node = work.nodes[i]
            op = operators[i] = look(node)
            if m == 1 or node in derived:
                found[i] = _whole(op)
                continue
            found[i] = tuple(choices(op))
            places = [*reads(node), *((node, k) for k in range(len(op.outputs)))]
            for choice in found[i]:
                for tensor, state in zip(places, (*choice.inputs, *choice.outputs), strict=True):
                    if state.sharded and state not in states[tensor]:
                        states[tensor].add(state)
                        dirty |= set(users[tensor]) - {i}
        if not dirty:
            break
    return Menu(tuple(found), tuple(operators))


def _whole(op: Operator) -> tuple[Choice, ...]:
    return tuple(c for c in choices(op) if all(s == R for s in (*c.inputs, *c.outputs)))[:1]


def plain_nodes(work: Work) -> set[Node]:
    """Nodes without gradient that no parameter and no drawn number enters (masks, positions).

    They are cheap and need no gradient, so they stay whole and are sliced where they are wanted
    in parts.
    """
    plain: set[Node] = set()
    for node in work.nodes:
        if (
            node.meta.get("effect")
            or draws(node)
            or any(v and v.differentiable for v in values_of(node))
        ):
            continue
        sources = [(n, k) for n, k in reads(node) if n not in plain]
        if all(n.meta.get("role") in ("leaf", "constant", "buffer") for n, _ in sources):
            plain.add(node)
    return plain
