"""Plans with pipeline stages that are proposed: the best of the searches, and other schedules.

order        ranks as they are; where some are slow, also the slow ones first and last
degrees      one for each stage; also one for each component, where that is quicker
schedules    1f1b; gpipe, which waits less for messages; zero bubble, which waits less for other
             stages, and with twice the memory less still; the best of interleaved 1f1b"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.stages.chunks import interleaved
from synchromesh.planner.stages.facts import GroupFacts, divisible, stage_problem
from synchromesh.planner.stages.mixes import mixed
from synchromesh.planner.stages.problem import StagePlan, StageProblem
from synchromesh.planner.stages.search import search
from synchromesh.planner.unequal import slowdowns_of
from synchromesh.planner.uniform import UniformPartitions
from synchromesh.planner.wording import worded
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.plan_item import Stage
from synchromesh.values.profile import Profile


def stage_plans(
    uniform: UniformPartitions, planned: PlanningProblem, profile: Profile,
    most: float = math.inf, each: int = 3,
) -> list[Plan]:  # fmt: skip
    """A few plans of two stages and more, the best of the search first; none where the model has
    one component, or nothing of stages is known. most: seconds of a step that they may take.
    each: plans of a schedule, as each one is priced by a walk of all its micro-batches; chosen."""
    if not divisible(uniform):
        return []
    slowdowns = slowdowns_of(profile, uniform.devices)
    facts = GroupFacts(uniform, profile, [r for r, slow in enumerate(slowdowns) if slow == 1.0])
    ranked = [
        (best, order)
        for order in orders(slowdowns)
        for best in _of_order(facts, stage_problem(facts, planned, order, slowdowns))
        if best is not None and best.seconds <= most
    ]
    ranked.sort(key=lambda x: x[0].seconds)
    plans: dict[Plan, None] = {}
    of_schedule = Counter[str]()
    for best, order in ranked:
        for plan in _scheduled(uniform, planned, best, order):
            if plan not in plans and of_schedule[plan.schedule] < each:
                plans[plan] = None
                of_schedule[plan.schedule] += 1
    return list(plans)


def _of_order(facts: GroupFacts, problem: StageProblem) -> Iterator[StagePlan | None]:
    """Of one order of ranks: of one degree in each stage, of several, interleaved; None: none."""
    for best in _best(problem):
        yield best
        yield mixed(problem, best, facts.inside)
    yield interleaved(problem)


def orders(slowdowns: Sequence[float]) -> list[tuple[int, ...]]:
    ranks = range(len(slowdowns))
    sequences = [ranks, *(sorted(ranks, key=lambda r: sign * slowdowns[r]) for sign in (1, -1))]
    return list(dict.fromkeys(map(tuple, sequences)))


def _best(problem: StageProblem, numbers: int = 2) -> Iterator[StagePlan]:
    """The best plan, then the best with other numbers of micro-batches. numbers: chosen."""
    for _ in range(numbers):
        best = search(problem)
        if best is None:
            return
        yield best
        others = tuple(m for m in problem.micro_batches if m != best.micro_batches)
        problem = replace(problem, micro_batches=others)


def _scheduled(
    uniform: UniformPartitions, planned: PlanningProblem, best: StagePlan, order: Sequence[int]
) -> Iterator[Plan]:
    plan = plan_of(best, planned.names, uniform.degrees, order, planned.modules)
    yield plan
    if best.micro_batches > 1 and best.chunks == 1:
        for schedule in ("gpipe", "zero-bubble", "zero-bubble-2"):
            yield replace(plan, schedule=schedule)


def plan_of(
    staged: StagePlan, names: Sequence[str], degrees: Sequence[int], order: Sequence[int],
    modules: Mapping[str, Sequence[str]] | None = None,
) -> Plan:  # fmt: skip
    """The plan in words. degrees: of each way; order: of the ranks that stages are laid on."""
    tensor = [degrees[way] for s in staged.stages for way in s.way_of]
    wide = 2 * math.lcm(*tensor)  # devices of which every degree is `data` or a hybrid
    plan = worded(names, [Layout(wide // t, t) for t in tensor], modules)
    groups, start = [], 0
    for stage in staged.stages[: len(staged.stages) // staged.chunks]:
        groups.append(tuple(order[start : start + stage.devices]))
        start += stage.devices
    stages = tuple(
        Stage(ranks, names[stage.first])
        for ranks, stage in zip(groups * staged.chunks, staged.stages, strict=True)
    )
    schedule = "1f1b" if staged.chunks == 1 else "interleaved"
    return replace(plan, stages=stages, micro_batches=staged.micro_batches, schedule=schedule)
