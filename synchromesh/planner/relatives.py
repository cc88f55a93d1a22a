"""Plainer relatives of a plan, to be priced beside it.

The search decides for each component alone, and saves every millisecond: its plans have patterns
that bring next to nothing. Of blocks that take the same seconds and bytes it matters little which
ones save memory:

    zero1 on 0 3 4 7, sharded-data on 1 2 5 6 8 9      runs        zero1 on 0-3
                                                       commonest   sharded-data on all
                                                       leanest     sharded-data on all
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from synchromesh.planner.planning_problem import PlanningProblem
from synchromesh.planner.uniform import Uniform
from synchromesh.planner.wording import worded
from synchromesh.values.layout import STATES, Layout
from synchromesh.values.plan import Plan


def relatives(uniform: Uniform, problem: PlanningProblem, plan: Plan) -> list[Plan]:
    """Plans of fewer words: without one of the patterns of `plan`; and where it has one stage,
    with components of equal programs laid out in runs, all by their commonest layout, or all by
    their leanest one."""
    each = range(len(plan.overrides))
    found = [replace(plan, overrides=plan.overrides[:i] + plan.overrides[i + 1 :]) for i in each]
    alike = defaultdict[object, list[int]](list)
    for i in range(len(problem.names)):
        alike[tuple(p.components[i].program for p in uniform.partitions.values())].append(i)
    for rule in range(0 if plan.stages else 3):
        layouts = problem.layouts(plan)
        made = list(layouts)
        for its in alike.values():
            for i, layout in zip(its, _simpler([layouts[i] for i in its])[rule], strict=True):
                made[i] = layout
        text = worded(problem.names, made, problem.modules, free=problem.step.coupling)
        found.append(replace(plan, default=text.default, overrides=text.overrides))
    return [p for p in dict.fromkeys(found) if p.words < plan.words]


def _simpler(layouts: Sequence[Layout]) -> tuple[list[Layout], ...]:
    """Layouts in the order in which they come first; all the commonest; all the one that saves
    most, by recomputation, by what is sharded over data ranks, by tensor degree."""
    count = Counter(layouts)
    leanest = max(count, key=lambda x: (x.recompute, STATES.index(x.shard_states), x.tensor))
    runs = [x for x, times in count.items() for _ in range(times)]
    return runs, [max(count, key=lambda x: count[x])] * len(runs), [leanest] * len(runs)
