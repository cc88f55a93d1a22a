"""Interleaved 1F1B: equal groups of devices with two stages each, cut by work.

Group g of p runs stages g and g + p. The fill is half as long as that of 1F1B (Narayanan et al.
2021, arXiv 2104.04473, section 2.2), where p divides m; sums are over the stages of a group:

    t       = max over groups of slowdown sum of t_s
    T       = m t + (p - 1) t / 2 + max over groups of sum of e_s
    memory  = sum of resident_s + min(2 (p - g - 1) + p + 1, 2 m) max of kept_s  <=  limit

What is in flight is `most_in_flight` (`values/schedule.py`). Numbers of groups, ways and m are
tried in the order of what they take where all is level, while that is less than the best."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from synchromesh.planner.stages.cuts import cut
from synchromesh.planner.stages.problem import PlannedStage, StagePlan, StageProblem
from synchromesh.values.schedule import most_in_flight

CHUNKS = 2  # stages of a group; the formulas above are of two


def interleaved(problem: StageProblem, most: int = 16) -> StagePlan | None:
    """The plan of least step time of those tried; None: memory holds none of them. most: plans
    that are tried; chosen, so that a search of 200 components takes a second."""
    best: StagePlan | None = None
    firsts: dict[PlannedStage, tuple[int, ...]] = {}
    for level, m, whole in sorted(_level(problem))[:most]:
        if not np.isfinite(level) or (best is not None and level >= best.seconds):
            break
        if whole not in firsts:
            firsts[whole] = _cut(problem, whole, m)
        plan = _plan(problem, whole, firsts[whole], m)
        if plan is not None and (best is None or plan.seconds < best.seconds):
            best = plan
    return best


def _level(problem: StageProblem, groups: int = 16) -> Iterator[tuple[float, int, PlannedStage]]:
    """Of every m, number of groups p and way: T without the end where all is level, m, and all
    components on one of the groups. groups: at most, as a cut takes as long as there are."""
    count = problem.components
    for m in problem.micro_batches:
        for s, size in enumerate(problem.sizes):
            p = problem.devices // size
            even = p * size == problem.devices and m % p == 0
            if even and 2 <= p <= groups and CHUNKS * p <= count:
                for way, seconds in enumerate(problem.costs(m).seconds[:, 0, count, s]):
                    yield _seconds(float(seconds) / p, p, m), m, PlannedStage(0, count, size, way)


def _seconds(t: float, p: int, m: int) -> float:
    """T without the end."""
    return m * t + (p - 1) * t / CHUNKS


def _cut(problem: StageProblem, whole: PlannedStage, m: int) -> tuple[int, ...]:
    """The first components of stages of level work, on groups like that of `whole`."""
    seconds = problem.costs(m).seconds[whole.way, :, :, problem.sizes.index(whole.devices)]
    work = [float(seconds[i, i + 1]) for i in range(whole.end)]
    return cut(work, CHUNKS * problem.devices // whole.devices)


def _plan(
    problem: StageProblem, whole: PlannedStage, firsts: tuple[int, ...], m: int
) -> StagePlan | None:
    """The plan of these cuts; None: memory does not hold it."""
    costs, size = problem.costs(m), problem.sizes.index(whole.devices)
    p = problem.devices // whole.devices
    stages = [replace(whole, first=i, end=j) for i, j in pairwise((*firsts, whole.end))]
    slowest = end = 0.0
    for g in range(p):
        slowdown, limit = problem.kind(g * whole.devices, whole.devices)
        own = [(s.way, s.first, s.end, size) for s in stages[g::p]]
        held = most_in_flight(CHUNKS * p, (g, g + p), m) * max(costs.kept[at] for at in own)
        if sum(costs.resident[at] for at in own) + held > limit:
            return None
        slowest = max(slowest, slowdown * sum(float(costs.seconds[at]) for at in own))
        end = max(end, sum(float(costs.end[at]) for at in own))
    return StagePlan(tuple(stages), m, _seconds(slowest, p, m) + end, chunks=CHUNKS)
