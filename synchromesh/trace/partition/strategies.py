"""Strategies: every valid combination of placements that the operators of a component have."""

from dataclasses import dataclass, replace

from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import draws
from synchromesh.trace.rules import Operator, OpSpec, op_specs
from synchromesh.trace.rules.operator import Operand, R
from synchromesh.values.placement import Placement, shard

from .subgraph import Subgraph, Tensor, operand_of, origin, reads, results_of

MOST_PASSES = 20  # over a component's operators, until no state is new: chosen, not measured


@dataclass(frozen=True)
class Strategies:
    """The specs of every operator of a component on m ranks, and the operators."""

    specs: tuple[tuple[OpSpec, ...], ...]
    operators: tuple[Operator, ...]

    def states_read(self, subgraph: Subgraph, placeholder: Node) -> set[Placement]:
        """The states in which the component's operators can read a placeholder."""
        return {
            spec.inputs[slot]
            for read, specs in zip(subgraph.reads, self.specs, strict=True)
            for slot, tensor in enumerate(read)
            if tensor == (placeholder, 0)
            for spec in specs
        }


def strategies(subgraph: Subgraph, m: int) -> Strategies:
    """The specs of a component's operators.

    Sharding in segments (a fused q-k-v weight) is found by passing the states that one operator
    asks for on to its neighbours, forwards and backwards, until nothing is new."""
    states = KnownStates(subgraph, m)
    nodes = subgraph.nodes
    replicated = cheap_nodes(subgraph)
    specs: list[tuple[OpSpec, ...]] = [()] * len(nodes)
    operators = [states.operator(n) for n in nodes]
    tensors = [[*read, *results_of(n)] for n, read in zip(nodes, subgraph.reads, strict=True)]
    users: dict[Tensor, set[int]] = {}
    for i, own in enumerate(tensors):
        for tensor in own:
            users.setdefault(tensor, set()).add(i)
    pending = set(range(len(nodes)))
    for turn in range(MOST_PASSES):
        order = sorted(pending, reverse=bool(turn % 2))
        pending = set()
        for i in order:
            pending.discard(i)
            operators[i] = states.operator(nodes[i])
            found = op_specs(operators[i])
            if m == 1 or nodes[i] in replicated:
                specs[i] = tuple(s for s in found if {*s.inputs, *s.outputs} <= {R})[:1]
                continue
            specs[i] = tuple(found)
            for spec in found:
                for tensor in states.add(tensors[i], (*spec.inputs, *spec.outputs)):
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
        """The operator with what is known of its operands now."""

        def operand(n: Node) -> Operand | None:
            return self.operand(origin(n)) if meta.value(n) is not None else None

        return Operator(node, self.m, operand, tuple(map(self.operand, results_of(node))))

    def add(self, tensors: list[Tensor], placements: tuple[Placement, ...]) -> list[Tensor]:
        """Adds the sharded placements of tensors; gives those for which one is new."""
        changed = []
        for tensor, state in zip(tensors, placements, strict=True):
            if state.sharded and state not in self.states[tensor]:
                self.states[tensor].add(state)
                changed.append(tensor)
        return changed


def cheap_nodes(subgraph: Subgraph) -> set[Node]:
    """Nodes without gradient that no parameter and no drawn number enters (masks, positions).

    They are cheap and need no gradient, so they stay replicated, and are sliced where a shard is
    wanted."""
    cheap: set[Node] = set()
    for node in subgraph.nodes:
        differentiable = any(v and v.differentiable for v in meta.values_of(node))
        if meta.effect(node) or draws(node) or differentiable:
            continue
        sources = [n for n, _ in reads(node) if n not in cheap]
        if all(meta.role(n) in ("leaf", "constant", "buffer") for n in sources):
            cheap.add(node)
    return cheap
