"""The analysis of a step: what no layout changes of its components, found once for all partitions.

Strategies are every valid combination of placements that a component's operators have."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.capture.coupling import dependent_on_rows
from synchromesh.trace.nodes import draws
from synchromesh.trace.rules import op_specs, rule_of
from synchromesh.trace.rules.operator import Operand, Operator, OpSpec, R
from synchromesh.trace.step import Step
from synchromesh.values.placement import Placement, shard

from .subgraph import (
    Subgraph,
    Tensor,
    gradient_flow,
    operand_of,
    origin,
    reads,
    results_of,
    subgraphs,
    value_of,
)

Reader = tuple[int, int]  # an operator of a component, and which of the tensors that it reads


@dataclass(frozen=True)
class Strategies:
    """The specs of every operator of a component on m ranks, and the operators."""

    specs: tuple[tuple[OpSpec, ...], ...]
    operators: tuple[Operator, ...]

    def states_read(self, subgraph: Subgraph, placeholder: Node) -> set[Placement]:
        return {
            spec.inputs[slot]
            for read, specs in zip(subgraph.reads, self.specs, strict=True)
            for slot, tensor in enumerate(read)
            if tensor == (placeholder, 0)
            for spec in specs
        }


def strategies(subgraph: Subgraph, m: int, most_passes: int = 20) -> Strategies:
    """The specs of a component's operators. Sharding in segments (a fused q-k-v weight) is found
    by passing the states that one operator asks for on to its neighbours, forwards and backwards,
    until nothing is new. most_passes: over the operators (chosen, not measured)."""
    states = KnownStates(subgraph, m)
    nodes = subgraph.nodes
    replicated = set(nodes) if m == 1 else cheap_nodes(subgraph)
    specs: list[tuple[OpSpec, ...]] = [()] * len(nodes)
    operators = [states.operator(n) for n in nodes]
    tensors = [[*read, *results_of(n)] for n, read in zip(nodes, subgraph.reads, strict=True)]
    users: dict[Tensor, set[int]] = {}
    for i, own in enumerate(tensors):
        for tensor in own:
            users.setdefault(tensor, set()).add(i)
    pending = set(range(len(nodes)))
    for turn in range(most_passes):
        order = sorted(pending, reverse=bool(turn % 2))
        pending = set()
        for i in order:
            pending.discard(i)
            operators[i] = states.operator(nodes[i])
            valid = op_specs(operators[i])
            if nodes[i] in replicated:
                specs[i] = tuple(s for s in valid if {*s.inputs, *s.outputs} <= {R})[:1]
                continue
            specs[i] = tuple(valid)
            for tensor in states.add_all(tensors[i], valid):
                pending |= users[tensor] - {i}
        if not pending:
            break
    return Strategies(tuple(specs), tuple(operators))


class KnownStates:
    """The sharded states that are tried for each tensor of a component."""

    def __init__(self, subgraph: Subgraph, m: int) -> None:
        self.own, self.m = set(subgraph.nodes), m
        self.states: dict[Tensor, set[Placement]] = {}

    def operand(self, tensor: Tensor) -> Operand:
        """The tensor with its states: to begin with, a shard of each dim that can be one."""
        if tensor not in self.states:
            bare = operand_of(tensor)
            shards = (shard(d) for d in range(len(bare.shape))) if self.m > 1 else ()
            self.states[tensor] = {s for s in shards if bare.allows(s, self.m)}
        known = operand_of(tensor, tuple(sorted(self.states[tensor])))
        return known if tensor[0] in self.own else replace(known, border=True)

    def operator(self, node: Node) -> Operator:
        def operand(n: Node) -> Operand | None:
            return self.operand(origin(n)) if meta.value(n) is not None else None

        return Operator(node, self.m, operand, tuple(map(self.operand, results_of(node))))

    def add_all(self, tensors: list[Tensor], specs: Sequence[OpSpec]) -> Iterator[Tensor]:
        """Adds the sharded placements of specs; gives the tensors for which one is new."""
        for spec in specs:
            for tensor, state in zip(tensors, (*spec.inputs, *spec.outputs), strict=True):
                if state.sharded and state not in self.states[tensor]:
                    self.states[tensor].add(state)
                    yield tensor


def cheap_nodes(subgraph: Subgraph) -> set[Node]:
    """Nodes without gradient that no parameter and no drawn number enters (masks, positions): they
    stay replicated, as they are cheap, and are sliced where a shard is wanted."""
    cheap: set[Node] = set()
    for node in subgraph.nodes:
        differentiable = any(v and v.differentiable for v in meta.values_of(node))
        if not (meta.effect(node) or draws(node) or differentiable):
            roles = {meta.role(n) for n, _ in reads(node) if n not in cheap}
            if roles <= {"leaf", "constant", "buffer"}:
                cheap.add(node)
    return cheap


class Analysis:
    """A step's components and the tensors between them; the step is not opaque. kinds: numbers,
    equal where components compute the same function. makers: the component that makes a tensor,
    and by which of its operators. readers: of each tensor, by component."""

    def __init__(self, step: Step) -> None:
        assert step.graph is not None, "an opaque step has no graph to partition"
        self.step = step
        self.flow = gradient_flow(step)
        self.subgraphs = subgraphs(step, self.flow)
        numbers: dict[Hashable, int] = {}  # instead of the signatures: they are long to hash
        self.kinds = [numbers.setdefault(s.signature, len(numbers)) for s in self.subgraphs]
        self.of_rows = dependent_on_rows(step.graph)
        self.outputs = [t for n in step.graph.find_nodes(op="output") for t in reads(n)]
        self.makers: dict[Tensor, tuple[int, int]] = {}
        self.readers: dict[Tensor, dict[int, list[Reader]]] = {}
        for subgraph in self.subgraphs:
            for i, node in enumerate(subgraph.nodes):
                self.makers |= dict.fromkeys(results_of(node), (subgraph.index, i))
                for slot, tensor in enumerate(subgraph.reads[i]):
                    by_component = self.readers.setdefault(tensor, {})
                    by_component.setdefault(subgraph.index, []).append((i, slot))
        self.operand = cache(operand_of)
        self._strategies: dict[tuple[int, int], Strategies] = {}

    def strategies(self, index: int, degree: int) -> Strategies:
        key = (self.kinds[index], degree)
        if key not in self._strategies:
            self._strategies[key] = strategies(self.subgraphs[index], degree)
        return self._strategies[key]


def obstacle(step: Step, component: int, degree: int) -> str | None:
    """Why no parameter of the component can be sharded over `degree` ranks; None where one can."""
    analysis = Analysis(step)
    subgraph, known = analysis.subgraphs[component], analysis.strategies(component, degree)
    if any(s.sharded for n in subgraph.parameters for s in known.states_read(subgraph, n)):
        return None
    if not subgraph.parameters:
        return "it has no parameters"
    reasons = {why_replicated(subgraph, known, n, degree) for n in subgraph.parameters}
    return "; ".join(sorted(reasons))


def why_replicated(subgraph: Subgraph, known: Strategies, parameter: Node, degree: int) -> str:
    """A sentence for a parameter that is not sharded."""
    value = value_of((parameter, 0))
    if any(s.sharded for s in known.states_read(subgraph, parameter)):
        size = value.bytes(1)
        return f"sharding its {size} bytes would cost traffic or keep another tensor whole"
    nodes = zip(subgraph.nodes, known.operators, strict=True)
    readers = [op for node, op in nodes if parameter in node.all_input_nodes]
    if unruled := sorted({op.name for op in readers if rule_of(op) is None}):
        return f"no rule shards {', '.join('aten.' + n for n in unruled)}"
    if max(value.shape, default=1) < 2:
        sizes = " and ".join(str(n) for n in value.shape) or "a scalar"
        return f"{sizes} has one entry"
    names = ", ".join(sorted({op.name for op in readers}))
    return f"{names} of shape {list(value.shape)} has no sharded form over {degree} ranks"
