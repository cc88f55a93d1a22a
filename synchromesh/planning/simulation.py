"""`sm.simulate`: plans walked on a cluster that need not be there, with devices that differ,
hosts that fail, and what it costs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.cost.planned_step import PlannedStep
from synchromesh.cost.step_time import Recorded, StepTime, recorded
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.candidate import Candidate, planned_step
from synchromesh.planner.problem import Say, silent
from synchromesh.planning.offline import MakeOptimizer, cluster_of, traced
from synchromesh.planning.session import PlanningSession, parsed
from synchromesh.programs.model import refuse_held
from synchromesh.simulator.failures import (
    DAY,
    Checkpoints,
    Presence,
    Recovery,
    Training,
    best_interval,
    failures_a_second,
)
from synchromesh.simulator.replay import Variation
from synchromesh.simulator.simulated import Failing, Scale, Simulated, SimulatedPlan
from synchromesh.simulator.step import parts, simulated
from synchromesh.trace.capture.carry import Start
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.workloads.workload import Loss

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Failures:
    """How hosts fail, and what is done about it. rate: per 1,000 host-days. interval, writing:
    seconds between checkpoints (default: the best) and for one. seeds: how many draws."""

    rate: float = 0.0
    recovery: Recovery = field(default_factory=Recovery)
    days: float = 30.0
    interval: float | None = None
    writing: float = 30.0
    presence: Presence | None = None
    seeds: int = 20


def simulate(
    model: nn.Module, loss: Loss, example_batch: Any, *, cluster: Cluster | str,
    plans: Sequence[Plan | str] = ("auto",), workload: str = "",
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW, memory: float | None = None,
    headroom: str | None = None, autocast: torch.dtype | None = None, carry: Start | None = None,
    variation: Variation | None = None, devices: Sequence[int] = (), scaling: Scaling = "strong",
    failures: Failures | None = None, price: HourlyPrice | None = None, say: Say = silent,
) -> Simulated:  # fmt: skip
    """What `plans` do on `cluster`, walked from event to event; no device is needed.

    example_batch: a global batch. variation: how devices differ. devices, scaling: also on so many
    devices of the same kind, with the same rows (`strong`) or the same rows on each (`weak`).
    failures: days of training with hosts that fail. price: of a step. The rest as of `sm.plan`.
    ValueError for a cluster or a plan that does not fit the other."""
    began = time.perf_counter()
    refuse_held(model, "simulate")
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    rows, step = traced(model, loss, example_batch, autocast, carry, say)
    if step.opaque:
        raise ValueError(
            f"the model cannot be traced, so nothing of a step is known: {step.reason}"
        )
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    variation = variation or Variation()
    variation.check(place)
    known = _Known(step, model, made, memory, headroom, say)
    session = known.on(place, rows)
    walked = [
        _priced(_walked(session, parsed(p), rows, variation), place, failures, price)
        for p in plans
    ]
    scales = [
        scale
        for plan in plans
        for scale in _scales(known, place, parsed(plan), rows, devices, scaling)
    ]
    chain = step.chain.names
    return Simulated(
        workload, place, place.source, place.error_band, tuple(walked), tuple(chain),
        time.perf_counter() - began, tuple(scales),
    )  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """What does not depend on the cluster."""

    step: Step
    model: nn.Module
    optimizer: Optimizer
    memory: float | None
    headroom: str | None
    say: Say

    def on(self, cluster: Cluster, rows: int) -> PlanningSession:
        return PlanningSession(
            DatasheetFacts.of(
                self.step, self.model, self.optimizer, rows, cluster, self.memory, self.headroom,
                self.say,
            )
        )  # fmt: skip


_Found = tuple[PlannedStep, Recorded]


def _recorded(session: PlanningSession, plan: Plan) -> tuple[Candidate, _Found | None]:
    """What is chosen for a plan, and the record of its step; None where it cannot run."""
    walks: list[Recorded] = []

    def walk(planned: PlannedStep, profile: Profile, pieces: int) -> StepTime:
        walks.append(recorded(planned, profile, pieces))
        return walks[-1].time

    if not plan.automatic:
        chosen, profile = session.priced(plan, None, walk)
    else:
        choice = session.choose(session.survey())
        chosen, profile = choice.chosen, choice.profile
    if chosen.time is None or profile is None:
        return chosen, None
    planned = planned_step(session.partitions, chosen.plan)
    known = (made for made in walks if made.time is chosen.time)
    return chosen, (planned, next(known, None) or recorded(planned, profile, chosen.time.pieces))


def _walked(
    session: PlanningSession, plan: Plan, rows: int, variation: Variation
) -> SimulatedPlan:
    chosen, found = _recorded(session, plan)
    if found is None:
        return SimulatedPlan(chosen.plan, rows, None, fits=False, reason=chosen.reason)
    step = simulated(*found, variation)
    peaks = tuple(float(m.peak) for m in chosen.memory)
    return SimulatedPlan(chosen.plan, rows, step, peaks, chosen.fits, chosen.reason)


def _priced(
    plan: SimulatedPlan, place: Cluster, failures: Failures | None, price: HourlyPrice | None
) -> SimulatedPlan:
    """With its days of failures, and its money."""
    if (step := plan.step) is None:
        return plan
    if failures is not None:
        plan = replace(plan, failures=_failing(failures, len(place.hosts), step.seconds))
    if price is not None:
        dollars = price.dollars(step.seconds, len(place.ranks))
        plan = replace(plan, dollars=dollars)
    return plan


def _failing(asked: Failures, hosts: int, step: float) -> Failing:
    rate, taken = failures_a_second(asked.rate), asked.presence and asked.presence.mean_between
    often = hosts * rate + 1.0 / (taken or inf)
    between = 1.0 / often if often else inf
    best = max(step, best_interval(between, asked.writing))  # no two checkpoints in a step
    interval = best if asked.interval is None else asked.interval
    training = Training(
        hosts, rate, Checkpoints(interval, asked.writing), asked.recovery, presence=asked.presence
    )
    outcomes = tuple(training.run(asked.days * DAY, seed) for seed in range(asked.seeds))
    return Failing(between, interval, best, outcomes)


def _scales(
    known: _Known, place: Cluster, plan: Plan, rows: int, devices: Sequence[int], scaling: Scaling
) -> list[Scale]:
    """Of a plan on each number of devices, beside one device with the same rows."""
    made, alone = [], Plan.parse("single")
    single = cache(lambda of: _recorded(known.on(catalogue.resized(place, 1), of), alone))
    for count in devices:
        of = rows if scaling == "strong" else max(1, rows * count // len(place.ranks))
        (one, by_one), (chosen, found) = single(of), single(of)
        if count > 1:
            chosen, found = _recorded(known.on(catalogue.resized(place, count), of), plan)
        if found is None or by_one is None:
            known.say(f"{plan} on {count} devices is left out: {chosen.reason or one.reason}")
            continue
        whole, into = by_one[1].time.seconds, parts(by_one[1], by_one[1].time.seconds)
        seconds = found[1].time.seconds
        beyond = {n: s - into[n] / count for n, s in parts(found[1], seconds).items()}
        del beyond["slower"]  # devices are alike
        made.append(Scale(str(plan), str(chosen.plan), count, of, seconds, whole / count, beyond))
    return made
