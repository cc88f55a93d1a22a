"""Descent by exact prices: better plans near the best ones, one change of their layouts at a time.

The search adds up what components take by themselves, and its sums of mixed plans are off. So
what lies around the best plans is priced exactly: those in which the components of one layout, or
those of them whose programs are equal, have another degree, another level of sharded states, or
are computed again or no longer.

    merit  =  seconds x max(1, peak / limit)^2                        seconds, bytes of a device
    the plan of least merit whose neighbours are not priced yet  ->  its neighbours

So a quick plan that lacks a little memory is a step on the way to one that fits."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from synchromesh.planner.candidate import Candidate
from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.planner.wording import worded
from synchromesh.values.layout import Layout, ShardStates
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class DescentTuning:
    """How far a descent goes, by measurements in docs/how-it-chooses.md."""

    prices: int = 100  # of plans, at most
    work: int = 500  # components in all of these: each takes 1 to 2 ms
    fewest: int = 20  # prices: with fewer, not all neighbours of a plan, there is no descent


TUNING = DescentTuning()


def descended(
    candidates: Sequence[Candidate], near: Callable[[Plan], Sequence[Plan]],
    price: Callable[[Sequence[Plan]], Sequence[Candidate]], problem: PlanningProblem,
) -> list[Candidate]:  # fmt: skip
    """What was priced, in its order, from `candidates` on. near: the neighbours of a plan."""

    def merit(c: Candidate) -> tuple[float, str]:
        peak = 0.0 if c.fits or c.fullest is None else c.fullest.peak
        return c.seconds * max(1.0, peak / max(1.0, problem.limit)) ** 2, str(c.plan)

    made: list[Candidate] = []
    known = {replace(c.plan, pieces=None) for c in candidates}
    ahead = [c for c in candidates if c.time is not None]
    left = min(TUNING.prices, TUNING.work // len(problem.names))
    while ahead and left >= (1 if made else TUNING.fewest):
        best = min(ahead, key=merit)
        ahead.remove(best)
        new = [p for p in near(best.plan) if p not in known][:left]
        known.update(new)
        priced = price(new)
        made += priced
        ahead += [c for c in priced if c.time is not None]
        left -= len(new)
    return made


def neighbours(
    uniform: UniformPartitions, problem: PlanningProblem, levels: Sequence[ShardStates], plan: Plan
) -> list[Plan]:
    """The plans of one change; none of a plan with idle devices, or settings but micro-batches."""
    count = plan.micro_batches
    plain = Plan(plan.default, plan.overrides, micro_batches=count, pieces=plan.pieces)
    if plan != plain or len(problem.ranks(plan)) < problem.devices:
        return []
    layouts, groups = problem.layouts(plan), defaultdict[object, list[int]](list)
    for i, layout in enumerate(layouts):
        groups[layout].append(i)
        groups[layout, *(p.components[i].program for p in uniform.partitions.values())].append(i)
    variants = [replace(plan, micro_batches=count // 2, pieces=None)] if count > 1 else []
    for its in groups.values():
        for other in _others(uniform, its, layouts[its[0]], levels):
            mixed = [other if i in its else x for i, x in enumerate(layouts)]
            made = worded(problem.names, mixed, problem.modules, problem.step.coupling)
            variants.append(replace(made, micro_batches=count))
    return list(dict.fromkeys(variants))


def _others(
    uniform: UniformPartitions, its: Sequence[int], layout: Layout, levels: Sequence[ShardStates]
) -> Iterator[Layout]:
    """The layout with one thing changed, where all these components may have it."""
    for m in uniform.degrees:
        if m != layout.tensor and all(uniform.offers(m, i) for i in its):
            states = layout.shard_states if m < uniform.devices else "none"
            yield replace(uniform.layout(m), shard_states=states, recompute=layout.recompute)
    for states in levels:
        if states != layout.shard_states and layout.data > 1:
            yield replace(layout, shard_states=states)
    yield replace(layout, recompute=not layout.recompute)
