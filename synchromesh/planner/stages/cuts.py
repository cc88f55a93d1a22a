"""Cuts of a chain into stages on equal groups of devices, by the work of its components.

    W = min over cuts of max over stages of the sum of weights
    of the cuts that reach W, the one of least sum of squares; of equal ones the latest

A pipeline is as quick as its slowest stage (PipeDream, SOSP 2019, section 3.1); the squares keep
the other stages level too, so that memory in flight is."""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from synchromesh.cost.planned_step import measured
from synchromesh.planner.candidate import planned_step
from synchromesh.planner.problem import PartitionCache
from synchromesh.trace.partition.local import Computation, Partition
from synchromesh.trace.step import Step
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


def cut(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first component of each stage. weights: seconds (or any measure of work) of each
    component, at least 0. ValueError where there are fewer components than stages."""
    if not 1 <= stages <= len(weights):
        raise ValueError(
            f"{stages} stages need as many components at least, and at least one; there are "
            f"{len(weights)}"
        )
    until = [0.0, *accumulate(weights)]

    def work(i: int, j: int) -> float:
        return until[j] - until[i]

    largest, _ = _best(len(weights), stages, work, max)
    allowed = largest + 1e-12 * until[-1]  # sums that differ by less are equal

    def square(i: int, j: int) -> float:
        return work(i, j) ** 2 if work(i, j) <= allowed else math.inf

    return _best(len(weights), stages, square, operator.add)[1]


def _best(
    count: int, stages: int, cost: Callable[[int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:  # fmt: skip
    """Least cost of components 0 .. count-1 in `stages`, and the first of each, where a stage
    i .. j-1 costs `cost(i, j)` and `joined` adds it to the cost of those before it."""
    least = [math.inf] * (count + 1)  # of the first j components in the stages so far
    least[0] = 0.0
    taken: list[list[int]] = []
    for _ in range(stages):
        row, begins = [math.inf] * (count + 1), [0] * (count + 1)
        for j in range(1, count + 1):
            for i in range(j):
                if least[i] < math.inf and (total := joined(cost(i, j), least[i])) <= row[j]:
                    row[j], begins[j] = total, i
        least = row
        taken.append(begins)
    firsts, j = [], count
    for begins in reversed(taken):
        j = begins[j]
        firsts.append(j)
    return least[count], tuple(reversed(firsts))


def cut_plan(step: Step, plan: Plan, weights: Sequence[float], devices: int) -> Plan:
    """The plan with stages of level work. weights: of each component. ValueError where the model
    has fewer components than stages, or these do not divide the devices."""
    names = step.chain.names
    plan.check_components(len(names), step.reason or step.merged)
    return plan.cut([names[i] for i in cut(weights, plan.stage_count)], devices)


def unstaged(plan: Plan, devices: int) -> Plan:
    """The plan as one stage with the tensor degrees that its stages have, whose programs are those
    of the stages' components. ValueError where the stages do not divide the devices."""
    stage = plan.cut(["x"] * plan.stage_count, devices).stages[0]
    return Plan(plan.default.of_stage, plan.overrides, ranks=stage.ranks)


def estimated_work(partition: Partition) -> list[float]:
    """Operations of each component, roughly."""
    computed = ([e for e in c.events if isinstance(e, Computation)] for c in partition.components)
    return [sum(e.work for e in events) for events in computed]


def measured_work(partitions: PartitionCache, plan: Plan, profile: Profile) -> list[float]:
    """Seconds of each component for a micro-batch of `plan`, cuts open, on the slowest rank."""
    alone = unstaged(plan, partitions.problem.devices)
    placed = planned_step(partitions, alone)
    rows = partitions.problem.rows / plan.micro_batches
    work = []
    for local in placed.partition.components:
        curves = measured(local, profile)
        here = rows / local.layout.data
        work.append(max(sum(curves.on(r, here)) for r in range(len(curves.forward))))
    return work
