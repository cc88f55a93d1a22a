"""The choice over plans, batch sizes and clusters: which reaches a target soonest, or for least.

For each cluster and batch of B rows there is the planner's quickest plan, of t seconds a step:

    time  =  ceil(E(B) rows / B) t,      money  =  what the cluster costs in that time

The frontier is what no other one equals in both and beats in one. The model is traced once: its
step serves all batch sizes."""

from collections.abc import Mapping, Sequence

import torch

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.cost.efficiency import Goal
from synchromesh.cost.target_plans import PlannedToTarget, TargetPlan
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.problem import Say, silent
from synchromesh.planning.offline import traced
from synchromesh.planning.session import PlanningSession
from synchromesh.values.cluster import Cluster
from synchromesh.workloads.stand_in import stand_in
from synchromesh.workloads.workload import Workload

MOST_BATCHES = 32  # that are tried where none are named


def _sizes(first: int, rows: int, asked: Sequence[int]) -> Sequence[int]:
    """Batches to try, of a workload whose own is the first."""
    if (most := max(asked or (first,))) > rows:
        raise ValueError(f"batches of {most:,} rows are more than the {rows:,} of the data")
    return asked or [first << k for k in range(MOST_BATCHES) if first << k <= rows]


def plan_to_target(
    workload: Workload, goal: Goal, clusters: Sequence[Cluster],
    prices: Mapping[str, HourlyPrice | None], batches: Sequence[int] = (),
    limits: tuple[float | None, str | None] = (None, None), autocast: torch.dtype | None = None,
    say: Say = silent,
) -> PlannedToTarget:  # fmt: skip
    """By time, without a deadline. prices: of clusters by name, None: not known. batches: default:
    the workload's times powers of two, while plans fit. limits: memory and headroom, as of
    `sm.plan`. ValueError for batches beyond the data set, and where nothing can be traced."""
    sizes, model = _sizes(workload.batch_size, goal.rows, batches), stand_in(workload)
    _, step = traced(model, workload.loss, workload.example(), autocast, workload.carry, say)
    if step.opaque:
        raise ValueError(f"the model cannot be traced, so no step is known: {step.reason}")
    optimizer = workload.build_optimizer(model.parameters())
    plans, misfits = list[TargetPlan](), list[str]()
    for place in clusters:
        price = prices[place.name]
        for batch in sizes:
            say(where := f"batches of {batch:,} on {place.name}")
            facts = DatasheetFacts.of(step, model, optimizer, batch, place, *limits)
            session = PlanningSession(facts)
            choice = session.choose(session.survey())
            if why := session.refusal(choice):
                misfits.append(f"{where}: {why}")
                if batches:
                    continue
                break  # larger ones need more
            rate = price.dollars(1.0, len(place.ranks)) if price else None
            until = goal.reached(batch, choice.chosen.seconds, rate)
            plans.append(TargetPlan(place.name, batch, choice.chosen.plan, until))
    return PlannedToTarget(tuple(plans), tuple(misfits))
