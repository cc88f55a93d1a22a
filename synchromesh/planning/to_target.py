"""The choice over plans, batch sizes and clusters: which reaches a target soonest, or for least.

For each cluster and batch of B rows there is the planner's quickest plan, of t seconds a step:

    time  =  ceil(E(B) rows / B) t,      money  =  what the cluster costs in that time

The frontier is what no other one equals in both and beats in one. The model is traced once: its
step serves all batch sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.cost.efficiency import Goal, ToTarget, document
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.problem import Say, silent
from synchromesh.planning.offline import traced
from synchromesh.planning.session import PlanningSession
from synchromesh.values.cluster import Cluster
from synchromesh.values.plan import Plan
from synchromesh.workloads.stand_in import stand_in
from synchromesh.workloads.workload import Workload

MOST_BATCHES = 32  # that are tried where none are named


@dataclass(frozen=True)
class TargetPlan:
    """The quickest plan of a cluster and a batch size, and what it takes to the target."""

    cluster: str
    batch: int
    plan: Plan
    until: ToTarget

    @property
    def cost(self) -> tuple[float, float]:
        """Seconds, and dollars: infinite where no price is known, so that they dominate none."""
        return self.until.seconds, inf if self.until.dollars is None else self.until.dollars

    def to_dict(self) -> dict[str, Any]:
        plan = {"cluster": self.cluster, "batch": self.batch, "plan": str(self.plan)}
        return plan | document(self.until)


@dataclass(frozen=True)
class PlannedToTarget:
    """The plans that were found; misfits: which batches fit no plan where, and why. The choice
    among them is `by_money` or by time, and within a deadline in seconds."""

    plans: tuple[TargetPlan, ...]
    misfits: tuple[str, ...] = ()
    by_money: bool = False
    deadline: float = inf

    @property
    def frontier(self) -> tuple[TargetPlan, ...]:
        """The plans that none dominates, the quickest first."""
        kept: list[TargetPlan] = []
        for plan in sorted(self.plans, key=lambda p: p.cost):
            if not kept or plan.cost[1] < kept[-1].cost[1]:
                kept.append(plan)
        return tuple(kept)

    @property
    def candidates(self) -> list[TargetPlan]:
        """Those of the frontier that can be chosen at all: by money, with a price."""
        return [p for p in self.frontier if not self.by_money or p.cost[1] < inf]

    @property
    def chosen(self) -> TargetPlan | None:
        """The quickest, or cheapest, candidate within the deadline; None: there is none."""
        found = [p for p in self.candidates if p.cost[0] <= self.deadline]
        return found[-1 if self.by_money else 0] if found else None

    @property
    def plan(self) -> Plan:
        """The chosen one, where there is one."""
        assert self.chosen is not None, self.refusal
        return self.chosen.plan

    @property
    def refusal(self) -> str:
        """Why there is none; nothing where there is one."""
        if self.chosen or not self.candidates:
            return "" if self.chosen else "; ".join(self.misfits)
        p, (seconds, dollars) = self.candidates[0], self.candidates[0].cost
        return (
            f"nothing reaches the target within {self.deadline:,.4g} s: the quickest, {p.plan} on "
            f"{p.cluster} in batches of {p.batch:,}, takes {seconds:,.4g} s and ${dollars:,.4g}"
        ).removesuffix(" and $inf")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        return {
            "for": "money" if self.by_money else "time",
            "deadline_seconds": self.deadline if self.deadline < inf else None,
            "frontier": [p.to_dict() for p in self.frontier], "misfits": list(self.misfits),
            "chosen": self.chosen and self.chosen.to_dict(), "refusal": self.refusal,
        }  # fmt: skip


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
