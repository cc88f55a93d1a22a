"""Plans with pipeline stages that are proposed: the best of the search, and the same under other
schedules.

    order        ranks as they are; where some are slow, also the slow ones first and last
    degrees      one for each stage; also one for each component, where that is quicker
    schedules    1f1b; gpipe, which waits less for messages; where groups are equal, interleaved
                 with two stages each, cut by work
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from synchromesh.planner.cuts import cut
from synchromesh.planner.planning_problem import PlanningProblem
from synchromesh.planner.stage_facts import GroupFacts, divisible, stage_problem
from synchromesh.planner.stage_mixes import mixed
from synchromesh.planner.stage_problem import PlannedStage, StagePlan, StageProblem
from synchromesh.planner.stages import search
from synchromesh.planner.unequal import TUNING as UNEQUAL
from synchromesh.planner.uniform import Uniform
from synchromesh.planner.wording import worded
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.plan_item import Stage
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class StagePlanTuning:
    """How many plans with stages are proposed; chosen, not measured."""

    numbers: int = 2  # of micro-batches: the best, and the best with another number
    again: int = 2  # stages of each group under the interleaved schedule
    plans: int = 6  # in all: each is priced by a walk of all its micro-batches


TUNING = StagePlanTuning()


def stage_plans(
    uniform: Uniform, planned: PlanningProblem, profile: Profile, most: float = math.inf
) -> list[Plan]:
    """A few plans of two stages and more, the best of the search first; none where the model has
    one component, or nothing of stages is known. most: seconds of a step that they may take."""
    if not divisible(uniform):
        return []
    slowness = slowness_of(profile, uniform.devices)
    facts = GroupFacts(uniform, profile, [r for r, slow in enumerate(slowness) if slow == 1.0])
    found: list[tuple[float, Plan]] = []
    for order in orders(slowness):
        problem = stage_problem(facts, planned, order, slowness)
        for best in _best(problem):
            for one in (best, mixed(problem, best, facts.inside)):
                if one is not None and one.seconds <= most:
                    plans = _scheduled(uniform, planned, problem, one, order)
                    found += ((one.seconds, plan) for plan in plans)
    quickest = dict.fromkeys(plan for _, plan in sorted(found, key=lambda x: x[0]))
    return list(quickest)[: TUNING.plans]


def slowness_of(profile: Profile, devices: int) -> tuple[float, ...]:
    """Seconds of each rank for what takes the quickest one; 1 of those that hardly differ."""
    speeds = profile.speeds
    if len(speeds) != devices:
        return (1.0,) * devices
    return tuple(1.0 if UNEQUAL.unequal * s >= max(speeds) else max(speeds) / s for s in speeds)


def orders(slowness: Sequence[float]) -> list[tuple[int, ...]]:
    """The ranks in the orders that stages are laid on."""
    ranks = range(len(slowness))
    found = [tuple(ranks)]
    found.append(tuple(sorted(ranks, key=lambda r: slowness[r])))
    found.append(tuple(sorted(ranks, key=lambda r: -slowness[r])))
    return list(dict.fromkeys(found))


def _best(problem: StageProblem) -> Iterator[StagePlan]:
    """The best plan, then the best with other numbers of micro-batches."""
    for _ in range(TUNING.numbers):
        best = search(problem)
        if best is None:
            return
        yield best
        others = tuple(m for m in problem.micro_batches if m != best.micro_batches)
        problem = replace(problem, micro_batches=others)


def _scheduled(
    uniform: Uniform,
    planned: PlanningProblem,
    problem: StageProblem,
    best: StagePlan,
    order: Sequence[int],
) -> Iterator[Plan]:
    """The plan under each schedule that it may have."""
    plan = plan_of(uniform, planned, best.stages, best.micro_batches, order)
    yield plan
    if best.micro_batches > 1:
        yield replace(plan, schedule="gpipe")
    stages, first = best.stages, best.stages[0]
    again = TUNING.again * len(stages)
    if again > problem.components or best.micro_batches < len(stages):
        return
    if any((s.devices, s.way, s.ways) != (first.devices, first.way, ()) for s in stages):
        return
    size = problem.sizes.index(first.devices)
    seconds = problem.ways(best.micro_batches).seconds[first.way, :, :, size]
    firsts = cut([float(seconds[i, i + 1]) for i in range(problem.components)], again)
    ends = (*firsts[1:], problem.components)
    chunks = [replace(first, first=i, end=j) for i, j in zip(firsts, ends, strict=True)]
    plan = plan_of(uniform, planned, chunks, best.micro_batches, order, len(stages))
    yield replace(plan, schedule="interleaved")


def plan_of(
    uniform: Uniform,
    planned: PlanningProblem,
    stages: Sequence[PlannedStage],
    micro_batches: int,
    order: Sequence[int],
    groups: int = 0,
) -> Plan:
    """The plan of stages on ranks in `order`. groups: how many there are where they come again."""
    tensor = [uniform.degrees[way] for s in stages for way in s.way_of]
    wide = 2 * math.lcm(*tensor)  # devices of which every degree is `data` or a hybrid
    layouts = [Layout(wide // t, t) for t in tensor]
    plan = worded(planned.names, layouts, planned.modules)
    starts = [0]
    for stage in stages:
        starts.append(starts[-1] + stage.devices)
    made = []
    for s, stage in enumerate(stages):
        start = starts[s % groups if groups else s]
        ranks = tuple(order[start : start + stage.devices])
        made.append(Stage(ranks, planned.names[stage.first]))
    return replace(plan, stages=tuple(made), micro_batches=micro_batches)
