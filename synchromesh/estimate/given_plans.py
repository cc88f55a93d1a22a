"""Given plans on a cluster that need not be there: what each is estimated to take."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from synchromesh.engine.model import Model
from synchromesh.estimate.planning import DatasheetFacts, MakeOptimizer
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.decide import decide, survey
from synchromesh.planner.planning_problem import PartitionCache, PlanningProblem
from synchromesh.planner.stage_cut import cut_plan, measured_work, unstaged
from synchromesh.trace.capture.batch import row_count
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster
from synchromesh.values.optimizer import coupled
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.workload import Loss


def traced(
    model: nn.Module, loss: Loss, example_batch: Any, autocast: torch.dtype | None = None
) -> Step:
    """The training step of a model. ValueError where it cannot be traced: there is no graph to
    estimate."""
    step = trace(model, loss, example_batch, training=True, autocast=autocast)
    if step.opaque:
        raise ValueError(f"nothing can be estimated of a model that runs whole: {step.reason}")
    return step


def quickest(
    step: Step, model: nn.Module, optimizer: MakeOptimizer, example_batch: Any, cluster: Cluster,
    families: Mapping[str, Sequence[str]],
) -> dict[str, Candidate]:  # fmt: skip
    """Of each family of plans the one of least estimated step time among those that fit; of
    `auto` what the planner chooses. One that does not fit where none does, its reason with it."""
    made = optimizer(model.parameters())
    rows = row_count(example_batch)
    limits = tuple(float(device.memory_bytes) for _, device in cluster.ranks)
    modules = Model(model).inside(step.chain.names)
    problem = PlanningProblem(step, rows, len(limits), modules, limits, coupled(made))
    partitions = PartitionCache(problem)
    facts = DatasheetFacts(problem, made, cluster)
    known = survey(partitions, facts)
    found: dict[str, Candidate] = {}
    for name, plans in families.items():
        if list(plans) == ["auto"]:
            found[name] = decide(partitions, facts, known).chosen
            continue
        candidates = [_priced(partitions, facts, known, Plan.parse(text)) for text in plans]
        found[name] = min(candidates, key=lambda c: (not c.fits, c.seconds))
    return found


def _priced(
    partitions: PartitionCache, facts: DatasheetFacts, known: Profile, plan: Plan
) -> Candidate:
    problem = partitions.problem
    try:
        if plan.open_cuts:
            profile = _with(partitions, facts, known, unstaged(plan, problem.devices), plan)
            work = measured_work(partitions, plan, profile)
            plan = cut_plan(problem.step, plan, work, problem.devices)
        return price(partitions, plan, _with(partitions, facts, known, plan, plan))
    except ValueError as error:
        return Candidate(plan, None, (), False, str(error))


def _with(
    partitions: PartitionCache, facts: DatasheetFacts, known: Profile, laid: Plan, plan: Plan
) -> Profile:
    """What is known, with the facts of the partition of `laid` and the micro-batches of `plan`."""
    ranks = partitions.problem.ranks(laid)
    partition = partitions.partition(laid)
    return facts.profile([partition], known, ranks, micro_batches=(plan.micro_batches,))
