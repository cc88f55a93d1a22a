"""Where a plan that leaves its cuts open (`pipeline:stages=2`) begins its stages: by the work of
the components under the layout that they will have there."""

from collections.abc import Sequence

from synchromesh.cost.step_time import measured
from synchromesh.planner.candidate import planned_step
from synchromesh.planner.problem import PartitionCache
from synchromesh.planner.stages.cuts import cut
from synchromesh.trace.partition.local import Computation, Partition
from synchromesh.trace.step import Step
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


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
    return [
        sum(e.work for e in local.events if isinstance(e, Computation))
        for local in partition.components
    ]


def measured_work(partitions: PartitionCache, plan: Plan, profile: Profile) -> list[float]:
    """Seconds of each component's forward and backward for a micro-batch of `plan`, whose cuts are
    open, on the slowest rank."""
    alone = unstaged(plan, partitions.problem.devices)
    placed = planned_step(partitions, alone)
    rows = partitions.problem.rows / plan.micro_batches
    found = []
    for local in placed.partition.components:
        curves = measured(placed, local, profile)
        here = rows / local.layout.data
        found.append(max(sum(curves.on(r, here)) for r in range(len(curves.forward))))
    return found
