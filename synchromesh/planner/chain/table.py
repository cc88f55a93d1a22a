"""The problem as arrays, node by node, with seconds on a grid on which sums are exact.

Node 0 is the batch, a component of one option that costs nothing; node i + 1 is component i.
Seconds are rounded to multiples of a power of two, so small that 2^50 of them are more than any
plan takes: float64 then adds them without error, in any order. Equal sums are equal numbers,
ties are ties, and equal inputs give equal plans (rounding changes a plan's time by about 1e-15
of the largest one, per number added)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synchromesh.planner.chain.problem import Floats, Ints, Option, PricedEdge, Prices, Problem


@dataclass(frozen=True, eq=False)
class Node:
    """Options of a component as columns, those left out that another one makes needless."""

    option: Ints  # index among the component's options
    border: tuple[int, ...]  # its borders, ascending
    at: Ints  # of each option: where its border stands in `border`
    always: Floats  # forward + update
    backward: Floats
    gradient: Floats
    memory: Floats

    def __len__(self) -> int:
        return len(self.option)

    def only(self, kept: NDArray[np.bool_]) -> "Node":
        columns = (self.always, self.backward, self.gradient, self.memory)
        return Node(self.option[kept], self.border, self.at[kept], *(c[kept] for c in columns))


@dataclass(frozen=True, eq=False)
class Table:
    """All nodes and values. values: between nodes; prices on the grid, inf in `forward` alone."""

    nodes: tuple[Node, ...]
    values: tuple[PricedEdge, ...]


def table(problem: Problem) -> Table:
    grid = _grid(problem)
    different = {id(options): options for options in problem.components}
    nodes = {key: _node(options, grid) for key, options in different.items()}
    rounded = {x: _prices(x, grid) for x in {link.prices for link in problem.links}}
    values = tuple(
        PricedEdge(link.source + 1, tuple(j + 1 for j in link.targets), rounded[link.prices])
        for link in problem.links
    )
    batch = _node((Option(0.0, 0.0),), grid)
    return Table((batch, *(nodes[id(options)] for options in problem.components)), values)


def _grid(problem: Problem) -> float:
    """The grid's spacing in seconds: 2^-50 of more than the slowest plan takes."""
    slowest = 0.0
    for options in problem.components:
        slowest += max(o.forward + o.backward + o.gradient + o.update for o in options)
    for prices, count in Counter(link.prices for link in problem.links).items():
        finite = np.where(np.isfinite(prices.forward), prices.forward, 0.0)
        finite += np.where(np.isfinite(prices.backward), prices.backward, 0.0)
        slowest += count * float(finite.sum(1).max(initial=0.0))
    return 2.0 ** (math.ceil(math.log2(slowest)) - 50) if slowest > 0 else 1.0


def _node(options: Sequence[Option], grid: float) -> Node:
    border = tuple(sorted({o.border for o in options}))
    numbers = np.array([(o.forward, o.update, o.backward, o.gradient) for o in options], float)
    forward, update, backward, gradient = (np.round(numbers / grid) * grid).T
    node = Node(
        np.arange(len(options)), border, np.array([border.index(o.border) for o in options]),
        forward + update, backward, gradient,
        np.array([o.memory for o in options], dtype=np.float64),
    )  # fmt: skip
    return node.only(~_needless(node))


def _needless(node: Node) -> NDArray[np.bool_]:
    """Options that another of equal border undercuts, or equals and precedes, in everything."""
    columns = np.stack([node.always, node.backward, node.gradient, node.memory], axis=1)
    needless = np.zeros(len(node), dtype=bool)
    for k in range(len(node)):
        below = (columns <= columns[k]).all(1) & (node.at == node.at[k])
        first = (columns != columns[k]).any(1) | (np.arange(len(node)) < k)
        needless[k] = bool((below & first).any())
    return needless


def _prices(prices: Prices, grid: float) -> Prices:
    allowed = np.isfinite(prices.forward) & np.isfinite(prices.backward)
    forward, backward = (
        np.round(np.where(allowed, seconds, 0.0) / grid) * grid
        for seconds in (prices.forward, prices.backward)
    )
    return Prices(np.where(allowed, forward, np.inf), backward, prices.form)
