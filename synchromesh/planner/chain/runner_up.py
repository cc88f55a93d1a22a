"""Runners-up: for each component, the best plan in which it has another border than chosen.

All are continuations of one narrow pass over the whole problem: its labels behind component i
stay, component i decides among the other borders, and the walk goes on from there."""

import math

import numpy as np

from .frontier import graph
from .labels import Labels, Space, candidates, decide, start
from .problem import Problem
from .table import Node, table
from .walk import Found, ended, gap, space_of, walk

WIDTH = 64  # labels kept at a cut


def runners_up(
    problem: Problem, found: Found, limit: float = math.inf
) -> tuple[Found | None, ...]:
    """By component; None: every plan within the limit that was found gives it the same border.

    A runner-up's gap says how much quicker a plan of the same other border might be."""
    prepared = _walked(problem, limit)
    if prepared is None:
        return (None,) * len(problem.components)
    return tuple(
        _other(problem, *prepared, i, node)
        for i, node in enumerate(_others(problem, prepared[0], found))
    )


def alternatives(problem: Problem, found: Found, limit: float, most: int) -> tuple[Found, ...]:
    """The runners-up at the components where bounds let another border look best, by time."""
    prepared = _walked(problem, limit)
    if prepared is None:
        return ()
    space, layers = prepared
    nodes = _others(problem, space, found)
    least = [_least(space, layers, i, node) for i, node in enumerate(nodes)]
    likely = [int(i) for i in np.argsort(least, kind="stable") if least[i] < math.inf]
    plans = [_other(problem, space, layers, i, nodes[i]) for i in likely[: 2 * most]]
    different = {plan.choice: plan for plan in plans if plan is not None}
    return tuple(sorted(different.values(), key=lambda p: (p.seconds, p.memory, p.choice))[:most])


def _walked(problem: Problem, limit: float) -> tuple[Space, dict[int, Labels]] | None:
    columns = table(problem)
    prepared = space_of(columns, graph(columns), limit)
    if prepared is None:
        return None
    last = len(columns.nodes)
    return prepared[0], walk(prepared[0], {last: start()}, last, math.inf, WIDTH)


def _others(problem: Problem, space: Space, found: Found) -> list[Node]:
    """Of each component, the node without the border that is chosen."""
    nodes = []
    for node, options, k in zip(
        space.table.nodes[1:], problem.components, found.choice, strict=True
    ):
        chosen = options[k].border
        nodes.append(node.only(np.array([node.border[at] != chosen for at in node.at])))
    return nodes


def _least(space: Space, layers: dict[int, Labels], i: int, node: Node) -> float:
    """A bound of the plans that continue the pass with these options of component i."""
    _, least = candidates(space, i + 1, node, layers[i + 2], math.inf)
    return float(least.min(initial=math.inf))


def _other(
    problem: Problem, space: Space, layers: dict[int, Labels], i: int, node: Node
) -> Found | None:
    behind = {cut: labels for cut, labels in layers.items() if cut >= i + 2}
    behind[i + 1] = decide(space, i + 1, node, layers[i + 2], math.inf, WIDTH)
    ahead = walk(space, behind, i + 1, math.inf, WIDTH)
    end = ended(problem, ahead)
    if end is None:
        return None
    lower = min(end.seconds, ahead[0].lost)
    return Found(end.choice, end.seconds, end.memory, gap(end.seconds, lower))
