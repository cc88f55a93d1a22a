"""Plainer relatives of a plan, to be priced beside it.

The search decides for each component alone, and saves every millisecond: its plans have patterns
that bring next to nothing. And of blocks that take the same seconds and bytes it matters little
which ones save memory:

    zero1 on 0 3 4 7, sharded-data on 1 2 5 6 8 9    ->    zero1 on 0-3, sharded-data on 4-9"""

from collections import defaultdict
from dataclasses import replace

from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.uniform import Uniform
from synchromesh.planner.wording import worded
from synchromesh.values.plan import Plan


def relatives(uniform: Uniform, problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """Plans of fewer words: without one of the patterns of `plan`; and where it has one stage,
    with the layouts of components of equal programs in runs."""
    each = range(len(plan.overrides))
    found = [replace(plan, overrides=plan.overrides[:i] + plan.overrides[i + 1 :]) for i in each]
    if not plan.stages:
        made, alike = list(problem.layouts(plan)), defaultdict[object, list[int]](list)
        for i in range(len(made)):
            alike[tuple(p.components[i].program for p in uniform.partitions.values())].append(i)
        for its in alike.values():
            first = [made[i] for i in its].index
            for i, layout in zip(its, sorted((made[i] for i in its), key=first), strict=True):
                made[i] = layout
        text = worded(problem.names, made, problem.modules, free=problem.step.coupling)
        found.append(replace(plan, default=text.default, overrides=text.overrides))
    return [p for p in dict.fromkeys(found) if p.words < plan.words]
