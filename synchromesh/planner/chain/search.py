"""The search: a dynamic programme from the last component to the first over labels of states.

A label is a choice for the components behind a cut. What matters of it is its state (the wanted
forms of open values, `frontier`) and three numbers:

    a = t + sum of F and update           the plan so far on the compute clock
    z = max(N, t) + sum of F and update   ... on the network clock
    m = sum of memory

Deciding a node with c = F + B + update takes it to

    a' = a + c        z' = max(z + c - B, a') + g        m' = m + memory

(g = 0: max(N, t') is right, for N below the compute clock never counts again.) The step time is z
at the front. c, B, g and memory depend on the state and the option alone, and a', z', m' grow
with a, z, m: of two labels of one state the one that is at most as large in all three can follow
every continuation of the other, and ends at most as late with at most as much memory. So dropping
dominated labels is exact. Labels whose bound (`bounds`) is above a known plan are dropped too.

Where more labels than a pass may keep are left, those of the largest bounds are lost; the least
bound among the lost is remembered, and no plan that was lost takes less. A narrow pass first finds
a good plan; wider ones, pruned by it, close the gap.

Memory first has no limit; only where the best plan is above it, it becomes the third number.

A component's runner-up is the best plan in which it has another border than chosen. All of them
are continuations of one narrow pass over the whole problem: its labels behind component i stay,
component i decides among the other borders, and the walk goes on from there."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from synchromesh.planner.chain import integer
from synchromesh.planner.chain.frontier import Graph, graph
from synchromesh.planner.chain.labels import (
    Labels,
    Space,
    candidates,
    decide,
    ended,
    space_of,
    start,
    walk,
)
from synchromesh.planner.chain.problem import EXACT, ChainPlan, Option, Prices, Problem, gap
from synchromesh.planner.chain.table import Node, Table, table


@dataclass(frozen=True)
class SearchTuning:
    """What a search may cost; chosen, so that `benchmarks.planning` meets its goals."""

    widths: tuple[int, ...] = (64, 512, 2048, 8192, 32_768)  # labels that passes keep at a cut
    always: int = 2  # passes that run whatever they cost
    work: int = 40_000_000  # labels times options of a further pass, in all
    runner_up: int = 64  # labels that the pass keeps which runners-up continue

    def passes(self, options: int) -> Iterator[int]:
        for k, width in enumerate(self.widths):
            if k >= self.always and options * width > self.work:
                return
            yield width


TUNING = SearchTuning()


def search(problem: Problem, limit: float = math.inf, most: int = 0) -> ChainPlan:
    """The plan of least step time with at most `limit` bytes on a device, and `most` others. Plans
    of equal seconds: less memory where neither clock tells them apart, then the smaller indices.
    Raises ValueError where prices allow no plan at all."""
    best = _search(problem, limit)
    if not most:
        return best
    others = alternatives(problem, best, limit if best.within else best.memory, most)
    return replace(best, alternatives=others)


def _search(problem: Problem, limit: float) -> ChainPlan:
    columns = table(problem)
    states = graph(columns)
    quickest = _quickest(problem, columns, states, math.inf, limit)
    if quickest is None:
        raise ValueError("no plan: infinite prices forbid every combination of options")
    if quickest.memory <= limit:
        return quickest
    within = _quickest(problem, columns, states, limit, limit)
    if within is not None:
        return within
    least = _least_memory(problem)
    lightest = _quickest(problem, columns, states, least, least)
    assert lightest is not None
    return replace(lightest, within=least <= limit)


def _quickest(
    problem: Problem, columns: Table, states: Graph, limit: float, wanted: float
) -> ChainPlan | None:
    """The best plan within the limit; ends early with one above `wanted` bytes; None: none."""
    prepared = space_of(columns, states, limit)
    if prepared is None:
        return None
    space, met = prepared
    every = (ChainPlan.of(problem, path.options) for path in met)
    allowed = [plan for plan in every if plan.memory <= limit and plan.seconds < math.inf]
    known = min(allowed, key=lambda p: (p.seconds, p.memory, p.choice), default=None)
    lower, last = space.bound.lower, len(columns.nodes)
    for width in TUNING.passes(sum(map(len, columns.nodes))):
        above = _seconds(known) * (1 + EXACT)
        layers = walk(space, {last: start()}, last, above, width)
        end = ended(problem, layers)
        if end and end.seconds <= above:
            known = end
        if known and known.memory > wanted:
            return known
        lower = max(lower, min(layers[0].lost, _seconds(known)))
        if lower >= _seconds(known) * (1 - EXACT):
            return known and replace(known, gap=0.0)
    if known is None:  # every label that was not lost ended in prices that forbid it
        return integer.quickest(problem, limit)
    return replace(known, gap=gap(known.seconds, lower))


def _seconds(plan: ChainPlan | None) -> float:
    return math.inf if plan is None else plan.seconds


def _least_memory(problem: Problem) -> float:
    """Bytes of the plan of least memory: the search with bytes in place of seconds."""
    heavy = tuple(
        tuple(Option(o.memory, 0.0, memory=o.memory, border=o.border) for o in options)
        for options in problem.components
    )
    known: dict[int, Prices] = {}
    for link in problem.links:
        allowed = np.isfinite(link.prices.forward) & np.isfinite(link.prices.backward)
        free = np.where(allowed, 0.0, np.inf)
        known.setdefault(id(link.prices), Prices(free, free, link.prices.form))
    links = tuple(replace(link, prices=known[id(link.prices)]) for link in problem.links)
    bytes_ = Problem(heavy, links)
    columns = table(bytes_)
    lightest = _quickest(bytes_, columns, graph(columns), math.inf, math.inf)
    assert lightest is not None
    return lightest.memory


def runners_up(
    problem: Problem, best: ChainPlan, limit: float = math.inf
) -> tuple[ChainPlan | None, ...]:
    """By component; None: no other border was found. gap: of plans of the same other border."""
    prepared = _walked(problem, limit)
    if prepared is None:
        return (None,) * len(problem.components)
    return tuple(
        _other(problem, *prepared, i, node)
        for i, node in enumerate(_others(problem, prepared[0], best))
    )


def alternatives(
    problem: Problem, best: ChainPlan, limit: float, most: int
) -> tuple[ChainPlan, ...]:
    """The runners-up at the components where bounds let another border look best, by time."""
    prepared = _walked(problem, limit)
    if prepared is None:
        return ()
    space, layers = prepared
    nodes = _others(problem, space, best)
    # bounds of the plans that continue the pass with the options of each node
    bounds = (candidates(space, i, n, layers[i + 1], math.inf)[1] for i, n in enumerate(nodes, 1))
    least = [float(x.min(initial=math.inf)) for x in bounds]
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
    return prepared[0], walk(prepared[0], {last: start()}, last, math.inf, TUNING.runner_up)


def _others(problem: Problem, space: Space, best: ChainPlan) -> list[Node]:
    """Of each component, the node without the border that is chosen."""
    chosen = [
        options[k].border for options, k in zip(problem.components, best.choice, strict=True)
    ]
    return [
        node.only(np.array([node.border[at] != border for at in node.at]))
        for node, border in zip(space.table.nodes[1:], chosen, strict=True)
    ]


def _other(
    problem: Problem, space: Space, layers: dict[int, Labels], i: int, node: Node
) -> ChainPlan | None:
    behind = {cut: labels for cut, labels in layers.items() if cut >= i + 2}
    behind[i + 1] = decide(space, i + 1, node, layers[i + 2], math.inf, TUNING.runner_up)
    ahead = walk(space, behind, i + 1, math.inf, TUNING.runner_up)
    end = ended(problem, ahead)
    if end is None:
        return None
    lower = min(end.seconds, ahead[0].lost)
    return ChainPlan(end.choice, end.seconds, end.memory, gap(end.seconds, lower))
