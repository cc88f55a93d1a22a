"""Bounds: what the undecided components cost at least, exact shortest paths of an easier problem.

The step time is the longest of the critical paths j that leave the compute clock for the network
clock at node j (`c = F + update + B` of a node, all prices paid there included):

    L_j(plan) = sum over i >= j of c_i  +  g_j  +  sum over i < j of (c_i - B_i + g_i)

Any mixture of them, weights delta >= 0 with sum 1, is at most the longest, and where memory is
bounded, a price mu >= 0 for a byte may be added to what is within the limit:

    step time >= sum over j of delta_j L_j  +  mu (memory - limit)
               = sum over i of  c_i - B_i + phi_(i+1) B_i + (1 - phi_i) g_i + mu memory_i  - mu limit
    with phi_i = sum of delta_j over j < i, the part on the compute clock at cut i.

That is a sum along a path through the states (`frontier.Graph`): the least rest from every state
to the front is one sweep of shortest paths. Values that the graph leaves out are priced at their
last target as if their source chose best. delta and mu decide how good a bound is, never whether
it holds. The best ones are found by cutting planes (Kelley 1960): every shortest path is a plan;
the linear program that maximises the bound over the plans found gives the next delta and mu.
"""  # noqa: E501

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from synchromesh.planner.chain.frontier import Graph
from synchromesh.planner.chain.problem import Floats, Ints
from synchromesh.planner.chain.table import Node


@dataclass(frozen=True, eq=False)
class Weights:
    """A mixture of critical paths, and a price of memory."""

    change: Floats  # delta by node
    byte: float = 0.0  # mu, s per byte

    @property
    def compute(self) -> Floats:
        """phi by cut."""
        shares: Floats = np.minimum(np.concatenate([[0.0], np.cumsum(self.change)]), 1.0)
        return shares


@dataclass(frozen=True, eq=False)
class OptionPath:
    """One choice: options (as places in their nodes) and what they come to, node by node."""

    options: tuple[int, ...]
    always: Floats  # F + update
    backward: Floats  # B
    gradient: Floats
    memory: float

    @property
    def paths(self) -> Floats:
        """L_j of every node j."""
        behind = np.cumsum((self.always + self.backward)[::-1])[::-1]
        front = np.cumsum(self.always + self.gradient) - self.always  # includes g_j
        return behind + front


@dataclass(frozen=True, eq=False)
class Bound:
    """`rest[i][state]`: weighed seconds that nodes 0 .. i - 1 add at least, from a state of cut i.
    `light[i][state]`: bytes that they add at least (empty without a limit)."""

    weights: Weights
    rest: tuple[Floats, ...]
    light: tuple[Floats, ...]
    limit: float

    @property
    def lower(self) -> float:
        """Seconds that any plan within the limit takes at least."""
        return float(self.rest[-1][0]) - self._spare

    @property
    def _spare(self) -> float:
        return self.weights.byte * self.limit if self.weights.byte > 0 else 0.0

    def least(self, cut: int, state: Ints, a: Floats, z: Floats, memory: Floats) -> Floats:
        """Least step time of the plans that a label at this cut can become."""
        phi = self.weights.compute[cut]
        mixed = phi * a + (1 - phi) * z + self.weights.byte * memory
        seconds: Floats = mixed + self.rest[cut][state] - self._spare
        return seconds


def bound(
    graph: Graph, limit: float, rounds: int = 30, close: float = 1e-6
) -> tuple[Bound, list[OptionPath]] | None:
    """The best bound found, and the plans on the way (within the limit or not); None: prices or
    memory allow no plan. rounds: of cutting planes; ten are usual. close: relative distance of the
    two linear programs at which rounds end. Both chosen."""
    nodes = len(graph.crossings)
    light = _light(graph) if limit < math.inf else ()
    if light and light[-1][0] > limit:
        return None
    weights = Weights(np.full(nodes, 1 / nodes))
    best: Bound | None = None
    plans: list[OptionPath] = []
    for _ in range(rounds):
        swept = Bound(weights, _sweep(graph, weights), light, limit)
        if swept.lower == math.inf:
            return None
        plans.append(_shortest(graph, swept))
        if best is None or swept.lower > best.lower:
            best = swept
        ceiling, weights = _heaviest(plans, limit)
        if ceiling - best.lower <= close * abs(ceiling):
            break
    assert best is not None
    return best, plans


def _heaviest(plans: list[OptionPath], limit: float) -> tuple[float, Weights]:
    """delta and mu with the largest bound over these plans, and that bound.

    maximise h  with  h <= sum of delta_j L_j(p) + mu (memory(p) - limit)  for every plan p"""
    paths = np.stack([plan.paths for plan in plans])
    second = max(float(paths.max()), 1e-30)
    over = np.array([plan.memory - limit if limit < math.inf else 0.0 for plan in plans])
    byte = max(float(np.abs(over).max()), 1e-30)
    rows = np.column_stack([-paths / second, -over / byte, np.ones(len(plans))])
    cost = np.zeros(rows.shape[1])
    cost[-1] = -1.0
    answer = linprog(
        cost, A_ub=rows, b_ub=np.zeros(len(plans)),
        A_eq=np.r_[np.ones(paths.shape[1]), 0.0, 0.0][None], b_eq=[1.0],
        bounds=[(0, 1)] * paths.shape[1] + [(0, 100), (None, None)], method="highs-ds",
    )  # fmt: skip
    assert answer.x is not None, answer.message
    change = np.clip(answer.x[:-2], 0.0, 1.0)
    weights = Weights(change / change.sum(), max(float(answer.x[-2]), 0.0) * second / byte)
    return float(answer.x[-1]) * second, weights


def _own(node: Node, before: float, behind: float, byte: float) -> Floats:
    """Weighed seconds of each option; before and behind are phi at the cuts around the node."""
    return node.always + behind * node.backward + (1 - before) * node.gradient + byte * node.memory


def _by_border(node: Node, cost: Floats) -> Floats:
    least = np.full(len(node.border), np.inf)
    np.minimum.at(least, node.at, cost)
    return least


def _sweep(graph: Graph, weights: Weights) -> tuple[Floats, ...]:
    phi = weights.compute
    rest = [np.zeros(1)]
    for i, node in enumerate(graph.frontier.table.nodes):
        crossing = graph.crossings[i]
        through = rest[-1][crossing.next] + crossing.forward + phi[i + 1] * crossing.backward
        through += _by_border(node, _own(node, phi[i], phi[i + 1], weights.byte))
        rest.append(through.min(1))
    return tuple(rest)


def _light(graph: Graph) -> tuple[Floats, ...]:
    """Bytes that nodes 0 .. i - 1 add at least, from every state of cut i (inf: no way)."""
    rest = [np.zeros(1)]
    for node, crossing in zip(graph.frontier.table.nodes, graph.crossings, strict=True):
        through = rest[-1][crossing.next] + _by_border(node, node.memory)
        rest.append(np.where(np.isfinite(crossing.forward), through, np.inf).min(1))
    return tuple(rest)


def _shortest(graph: Graph, swept: Bound) -> OptionPath:
    """The plan that a sweep's shortest path from the last cut to the front takes."""
    phi, state, memory = swept.weights.compute, 0, 0.0
    nodes = graph.frontier.table.nodes
    columns = np.zeros((3, len(nodes)))
    options = []
    for i in reversed(range(len(nodes))):
        node, crossing = nodes[i], graph.crossings[i]
        rest = swept.rest[i][crossing.next[state]]
        price = crossing.forward[state] + phi[i + 1] * crossing.backward[state]
        own = _own(node, phi[i], phi[i + 1], swept.weights.byte)
        option = int(np.argmin((rest + price)[node.at] + own))
        at = node.at[option]
        options.append(int(node.option[option]))
        columns[0, i] = node.always[option] + crossing.forward[state, at]
        columns[1, i] = node.backward[option] + crossing.backward[state, at]
        columns[2, i] = node.gradient[option]
        memory += float(node.memory[option])
        state = int(crossing.next[state, at])
    return OptionPath(tuple(reversed(options[:-1])), columns[0], columns[1], columns[2], memory)
