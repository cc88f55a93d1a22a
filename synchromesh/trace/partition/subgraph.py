"""A component as a subgraph of the step: its operators, and the tensors that they read and make.

Components of equal `signature` compute the same function of other tensors; they are analysed
once, share the variables of the integer program, and come out with equal placements."""

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from synchromesh.trace import meta
from synchromesh.trace.nodes import Reference, calls
from synchromesh.trace.rules.operator import ROWS, Operand, operand
from synchromesh.trace.step import Step
from synchromesh.values.component import Value
from synchromesh.values.placement import Placement

Tensor = tuple[Node, int]  # a node and which of its results


def origin(node: Node) -> Tensor:
    """The tensor that a node stands for: an entry of a tuple is that result of its maker."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        inner = node.args[0]
        if isinstance(meta.value(inner), tuple):
            assert isinstance(node.args[1], int)
            return inner, node.args[1]
    return node, 0


def results_of(node: Node) -> list[Tensor]:
    return [(node, k) for k in range(len(meta.values_of(node)))]


def value_of(tensor: Tensor) -> Value:
    """The tensor's description; an entry of a tuple has the name of the node that takes it out."""
    node, k = tensor
    described: Value = meta.value(node)
    if isinstance(described, tuple):
        takers = (u for u in node.users if u.target is operator.getitem and u.args[1] == k)
        taker = next(takers, None)
        described = described[k] if taker is None else meta.value(taker)
    return described


def reads(node: Node) -> list[Tensor]:
    """The tensors a node reads, in call order, a repeated one each time."""
    read: list[Node] = []
    map_arg((node.args, node.kwargs), read.append)
    return [origin(n) for n in read if meta.value(n) is not None]


def operand_of(tensor: Tensor, states: tuple[Placement, ...] = ()) -> Operand:
    """The tensor as rules see it; not sharded where its rows lie in several dims or no order."""
    node, k = tensor
    proved = meta.why_irregular(node, k) is None
    value = value_of(tensor)
    described = replace(operand(value, states), rows_proved=proved)
    val = meta.val(node)
    val = val[k] if isinstance(val, list | tuple) else val
    if val is None or (sizes := _sizes(val)) == described.shape:
        return described
    known = prod(value.shape) * (ROWS**value.rows.power if value.rows else 1)
    return replace(described, regular=False, sized=prod(sizes) == known)


def _sizes(val: torch.Tensor) -> tuple[int, ...]:
    exprs = [size.node.expr if isinstance(size, torch.SymInt) else size for size in val.shape]
    return tuple(
        e if isinstance(e, int) else int(e.subs(dict.fromkeys(e.free_symbols, ROWS)))
        for e in exprs
    )


@dataclass(frozen=True)
class Subgraph:
    """One component of a step: its operators in order and the tensors it reads from outside."""

    index: int
    nodes: tuple[Node, ...]
    parameters: tuple[Node, ...]  # placeholders in order of first use
    buffers: tuple[Node, ...]
    constants: tuple[Node, ...]
    borders: tuple[Tensor, ...]  # leaves and values of earlier components in order of first use
    reads: tuple[tuple[Tensor, ...], ...]  # of each operator, in call order
    names: Mapping[Tensor, Hashable]  # of all its tensors, the same in components of a signature
    signature: Hashable


@dataclass(frozen=True)
class GradientFlow:
    """Of all the step: which tensors a gradient flows through, and which buffers change."""

    needs: frozenset[Tensor]  # tensors that a gradient of the outputs reaches
    mutated: frozenset[Node]
    backward: bool


def gradient_flow(step: Step) -> GradientFlow:
    """The flow of gradients in a step; none in one that computes metrics."""
    assert step.graph is not None
    backward = step.outputs in (("loss",), ("sum", "weight"))
    needs: set[Tensor] = set()
    for node in reversed(step.graph.nodes) if backward else ():
        if node.op == "output" or _differentiable(results_of(node)) & needs:
            needs |= _differentiable(reads(node))
    changing = filter(meta.effect, calls(step.graph))
    mutated = {n for node in changing for n, _ in reads(node) if meta.role(n) == "buffer"}
    return GradientFlow(frozenset(needs), frozenset(mutated), backward)


def _differentiable(tensors: Iterable[Tensor]) -> set[Tensor]:
    described = ((t, value_of(t)) for t in tensors)
    return {t for t, value in described if value is not None and value.differentiable}


def subgraphs(step: Step, flow: GradientFlow) -> tuple[Subgraph, ...]:
    assert step.graph is not None
    nodes: list[list[Node]] = [[] for _ in step.chain.components]
    for node in calls(step.graph):
        if meta.values_of(node) and origin(node) == (node, 0):
            nodes[meta.component(node)].append(node)
    return tuple(_subgraph(i, tuple(own), flow) for i, own in enumerate(nodes))


def _subgraph(index: int, nodes: tuple[Node, ...], flow: GradientFlow) -> Subgraph:
    own, read = set(nodes), tuple(tuple(reads(node)) for node in nodes)
    kinds: dict[str, dict[Node, None]] = {"parameter": {}, "buffer": {}, "constant": {}}
    borders: dict[Tensor, None] = {}
    for maker, k in chain.from_iterable(read):
        if meta.role(maker) in kinds:
            kinds[meta.role(maker)][maker] = None
        elif maker not in own:
            borders[maker, k] = None
    names: dict[Tensor, Hashable] = {
        (n, 0): (kind, i, n in flow.mutated)
        for kind, holders in kinds.items()
        for i, n in enumerate(holders)
    }
    names |= {t: ("border", i) for i, t in enumerate(borders)}
    signature: list[Hashable] = [(names[t], _type_of(t, flow)) for t in names]

    def refer(node: Node) -> Reference:
        if meta.values_of(node):
            return Reference(names[origin(node)])
        return Reference((str(node.target), map_arg(node.args, refer)))

    for i, node in enumerate(nodes):
        arguments = map_arg((node.args, node.kwargs), refer)
        signature.append((str(node.target), repr(arguments)))
        for tensor in results_of(node):
            names[tensor] = ("result", i, tensor[1])
            signature.append((names[tensor], _type_of(tensor, flow)))
    parameters, buffers, constants = map(tuple, kinds.values())
    return Subgraph(
        index, nodes, parameters, buffers, constants, tuple(borders), read, names, tuple(signature)
    )


def _type_of(tensor: Tensor, flow: GradientFlow) -> Hashable:
    value: Value | None = value_of(tensor)
    if value is None:
        return None
    regular = meta.why_irregular(*tensor) is None
    return replace(value, name=""), tensor in flow.needs, regular
