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

Memory first has no limit; only where the best plan is above it, it becomes the third number."""

import math
from dataclasses import replace

import numpy as np

from . import integer
from .frontier import Graph, graph
from .labels import start
from .problem import Option, Prices, Problem
from .runner_up import alternatives
from .table import Table, table
from .walk import EXACT, Found, ended, found_of, gap, space_of, walk

WIDTHS = (64, 512, 2048, 8192, 32_768)  # labels that the passes keep at a cut
WORK = 40_000_000  # labels times options of a pass, in all; the first two passes always run


def search(problem: Problem, limit: float = math.inf, most: int = 0) -> Found:
    """The plan of least step time with at most `limit` bytes on a device, and `most` others.

    Plans of equal seconds: less memory where neither clock tells them apart, then the smaller
    indices. Raises ValueError where prices allow no plan at all."""
    found = _search(problem, limit)
    if not most:
        return found
    others = alternatives(problem, found, limit if found.fits else found.memory, most)
    return replace(found, alternatives=others)


def _search(problem: Problem, limit: float) -> Found:
    columns = table(problem)
    states = graph(columns)
    found = _quickest(problem, columns, states, math.inf, limit)
    if found is None:
        raise ValueError("no plan: infinite prices forbid every combination of options")
    if found.memory <= limit:
        return found
    within = _quickest(problem, columns, states, limit, limit)
    if within is not None:
        return within
    least = _least_memory(problem)
    lightest = _quickest(problem, columns, states, least, least)
    assert lightest is not None
    return replace(lightest, fits=least <= limit)


def _quickest(
    problem: Problem, columns: Table, states: Graph, limit: float, wanted: float
) -> Found | None:
    """The best plan found within the limit; None: there is none.

    Ends early, with a plan above the wanted bytes, where that is what a pass finds."""
    prepared = space_of(columns, states, limit)
    if prepared is None:
        return None
    space, met = prepared
    every = [found_of(problem, plan.options) for plan in met]
    allowed = [found for found in every if found.memory <= limit and found.seconds < math.inf]
    known = min(allowed, key=_order, default=None)
    lower, last = space.bound.lower, len(columns.nodes)
    options = sum(len(node) for node in columns.nodes)
    for k, width in enumerate(WIDTHS):
        if k >= 2 and options * width > WORK:
            break
        above = known.seconds * (1 + EXACT) if known else math.inf
        layers = walk(space, {last: start()}, last, above, width)
        end = ended(problem, layers)
        if end and (known is None or end.seconds <= above):
            known = end
        if known and known.memory > wanted:
            return known
        seconds = known.seconds if known else math.inf
        lower = max(lower, min(layers[0].lost, seconds))
        if lower >= seconds * (1 - EXACT):
            return replace(known, gap=0.0) if known else None
    if known is None:  # every label that was not lost ended in prices that forbid it
        return integer.quickest(problem, limit)
    return replace(known, gap=gap(known.seconds, lower))


def _order(found: Found) -> tuple[float, int, tuple[int, ...]]:
    return found.seconds, found.memory, found.choice


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
    found = _quickest(bytes_, columns, graph(columns), math.inf, math.inf)
    assert found is not None
    return found.memory
