"""The law of placement rules, checked for every spec an operator has: value and gradient are
those of the unsharded operator.

`check(op, args, kwargs, m=2)` splits the inputs as each spec says, runs the local operator on
m threads, and compares. It returns the specs as text, `"r, S(0), S(0) -> S(2)"`, so that a
test can ask for those that matter.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from synchromesh.trace import meta
from synchromesh.trace.nodes import arguments
from synchromesh.trace.partition.analysis import strategies
from synchromesh.trace.partition.subgraph import Subgraph, reads
from synchromesh.trace.rules.operator import Emit, OpSpec
from synchromesh.values.component import Value
from synchromesh.values.placement import Placement
from tests.threads import ThreadAxis, ThreadGroup, join, part, spin


def node_of(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Node, list[Tensor], list[Tensor]]:
    """A graph node of `op` on placeholders for its tensors, with values; the tensors, and what
    it makes."""
    graph = torch.fx.Graph()
    tensors: list[Tensor] = []

    def hold(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        for place, other in zip(graph.find_nodes(op="placeholder"), tensors, strict=True):
            if other is x:
                return place
        node = graph.placeholder(f"x{len(tensors)}")
        meta.value.set(node, value(node.name, x))
        meta.role.set(node, "leaf")
        meta.name.set(node, node.name)
        tensors.append(x)
        return node

    held = pytree.tree_map(hold, (tuple(args), dict(kwargs)))
    node = graph.call_function(op, *held)
    made = op(*args, **kwargs)
    outputs = list(made) if isinstance(made, list | tuple) else [made]
    values = tuple(value(f"y{i}", y) for i, y in enumerate(outputs))
    meta.value.set(node, values if isinstance(made, list | tuple) else values[0])
    return node, tensors, outputs


def subgraph_of(node: Node) -> Subgraph:
    """The node as the one operator of a component."""
    read = tuple(reads(node))
    return Subgraph(0, (node,), (), (), (), tuple(dict.fromkeys(read)), (read,), {}, ())


def value(name: str, x: Tensor) -> Value:
    return Value(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), None, x.requires_grad)


def check(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    m: int = 2,
    compared: int | None = None,
) -> set[str]:
    """Every spec of the operator on m ranks against the unsharded one; the specs as text.

    compared: how many of its results, where not all are read.
    """
    node, tensors, outputs = node_of(op, args, kwargs or {})
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.randn(y.shape, dtype=y.dtype, generator=generator) if y.requires_grad else y
        for y in outputs
    ]
    live = [(y, g) for y, g in zip(outputs, seeds, strict=True) if y.requires_grad]
    wants = [x for x in tensors if x.requires_grad]
    found = (
        torch.autograd.grad([y for y, _ in live], wants, [g for _, g in live], allow_unused=True)
        if live
        else []
    )
    expected = {
        id(x): torch.zeros_like(x) if g is None else g for x, g in zip(wants, found, strict=False)
    }
    subgraph = subgraph_of(node)
    places = {n: t for n, t in zip(node.graph.find_nodes(op="placeholder"), tensors, strict=True)}
    operands = [places[n] for n, _ in reads(node)]
    names = set()
    for spec in strategies(subgraph, m).specs[0]:
        text = f"{', '.join(map(str, spec.inputs))} -> {', '.join(map(str, spec.outputs))}"
        assert text not in names, f"{text} twice"
        names.add(text)
        try:
            check_spec(node, spec, operands, outputs[:compared], seeds[:compared], expected, m)
        except Exception as error:
            error.add_note(f"{node.target}: {text} on {m} ranks")
            raise
    return names


def local_graphs(
    op: Any, args: Sequence[Any], m: int
) -> list[tuple[OpSpec, torch.fx.GraphModule]]:
    """Every spec of the operator on m ranks, and what a rank then runs."""
    node, _, _ = node_of(op, args, {})
    specs = strategies(subgraph_of(node), m).specs[0]
    return [(s, local_graph(node, s, len(reads(node)))) for s in specs]


def local_graph(node: Node, spec: OpSpec, count: int) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    axis = graph.placeholder("axis")
    inputs = iter([graph.placeholder(f"x{i}") for i in range(count)])
    given = {name: map_arg(x, lambda n: next(inputs)) for name, x in arguments(node).items()}
    emit = Emit(graph, axis)
    graph.output(spec.replace(emit, given) if spec.replace else emit.original(node, given))
    return torch.fx.GraphModule({}, graph)


def split(x: Tensor, state: Placement, kind: str, group: ThreadGroup) -> Tensor:
    """This rank's share of a value (`kind` P is partial) or of a gradient (`kind` r is
    partial)."""
    if state.sharded:
        return part(x, state, group.size, group.index).clone()
    if state.kind != kind or not (x.is_floating_point() or x.is_complex()):
        return x.clone()
    generator = torch.Generator().manual_seed(7)
    noise = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(group.size)]
    return x / group.size + noise[group.index] - sum(noise, torch.zeros_like(x)) / group.size


def whole(parts: list[Tensor], state: Placement, kind: str) -> Tensor:
    if state.sharded:
        return join(parts, state)
    if state.kind == kind:
        return torch.stack(parts).sum(0)
    for p in parts[1:]:
        torch.testing.assert_close(p, parts[0], atol=1e-12, rtol=1e-12)
    return parts[0]


def check_spec(
    node: Node, spec: OpSpec, operands: list[Tensor], outputs: list[Tensor], seeds: list[Tensor],
    expected: Mapping[int, Tensor], m: int,
) -> None:  # fmt: skip
    module = local_graph(node, spec, len(operands))

    def rank(group: ThreadGroup) -> Any:
        inputs = [
            split(x.detach(), s, "P", group).requires_grad_(x.requires_grad)
            for x, s in zip(operands, spec.inputs, strict=True)
        ]
        made = module(ThreadAxis(group), *inputs)
        made = list(made)[: len(outputs)] if isinstance(made, list | tuple) else [made]
        pairs = [
            (y, split(g, s, "r", group))
            for y, g, s, o in zip(made, seeds, spec.outputs, outputs, strict=False)
            if o.requires_grad
        ]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs]
        without = tuple(x.grad is None for x in inputs)
        return [y.detach() for y in made], gradients, without

    ranks = spin(m, rank)
    assert len({r[2] for r in ranks}) == 1, "moves run backward on all ranks or on none"
    for k, (y, s) in enumerate(zip(outputs, spec.outputs, strict=False)):
        mine = whole([r[0][k] for r in ranks], s, "P")
        torch.testing.assert_close(mine, y.detach(), atol=1e-11, rtol=1e-11)
    totals: dict[int, Tensor] = {}
    for k, (x, s) in enumerate(zip(operands, spec.inputs, strict=True)):
        if x.requires_grad and outputs[0].requires_grad:
            mine = whole([r[1][k] for r in ranks], s, "r")
            totals[id(x)] = totals.get(id(x), torch.zeros_like(mine)) + mine
    for k, mine in totals.items():
        torch.testing.assert_close(mine, expected[k], atol=1e-11, rtol=1e-11)
