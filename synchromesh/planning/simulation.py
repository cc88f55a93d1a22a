"""`sm.simulate`: plans walked on a cluster that need not be there, with devices that differ,
hosts that fail, and what it costs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from synchromesh import catalogue
from synchromesh.catalogue.prices import HourlyPrice
from synchromesh.cost.alive_bytes import held_bytes
from synchromesh.cost.efficiency import Goal
from synchromesh.cost.planned_step import PlannedStep, exchange_seconds
from synchromesh.cost.step_time import Recorded, StepTime, Walk, recorded
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.estimate.shared_links import SharedLinks
from synchromesh.planner.candidate import Candidate, planned_step
from synchromesh.planner.problem import Say, silent
from synchromesh.planning.layer_facts import LayerFacts
from synchromesh.planning.layer_profile import LayerProfile
from synchromesh.planning.offline import MakeOptimizer, cluster_of, traced
from synchromesh.planning.session import PlanningSession, parsed
from synchromesh.programs.model import refuse_held
from synchromesh.simulator.asynchronous import NO_MESSAGES, MessageSeconds
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
from synchromesh.simulator.simulated import Failing, Scale, Simulated, SimulatedPlan, State
from synchromesh.simulator.step import parts, simulated
from synchromesh.trace.capture.carry import Start
from synchromesh.values.allowance import Allowance
from synchromesh.values.cluster import Cluster
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.topology import ANY
from synchromesh.workloads.workload import Loss

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Failures:
    """How hosts fail, and what is done about it. rate: per 1,000 host-days. interval, writing:
    seconds between checkpoints (default: the best) and for one (default: by its bytes). storage:
    bytes a second of checkpoints that a host writes or reads. seeds: how many draws."""

    rate: float = 0.0
    recovery: Recovery = field(default_factory=Recovery)
    days: float = 30.0
    interval: float | None = None
    writing: float | None = None
    presence: Presence | None = None
    seeds: int = 20
    storage: float = 1e9

    def moving(self, place: Cluster, state: State) -> float:
        """Seconds until hosts have their state again: over the slowest link from those that are
        left, if they have all of it, else from storage, of which each host reads a part."""
        each = -(-len(place.ranks) // len(place.hosts))
        links = (*place.links, *filter(None, [place.network]))
        rates = [link.bytes_per_second for link in links if link.a != link.b or link.a == ANY]
        if self.keeps(state) and rates:
            return each * state.held / min(rates)
        return state.whole / (len(place.hosts) * self.storage)

    def keeps(self, state: State) -> bool:
        """Whether no step is lost, as other hosts hold all that one held."""
        return self.recovery.kind == "continue" and state.kept


@dataclass(frozen=True)
class Conditions:
    """Under which plans are walked and what for: see `simulate`."""

    variation: Variation = field(default_factory=Variation)
    devices: Sequence[int] = ()
    scaling: Scaling = "strong"
    failures: Failures | None = None
    price: HourlyPrice | None = None
    spot: HourlyPrice | None = None
    goal: Goal | None = None

    def check(self, place: Cluster) -> None:
        """ValueError for devices that `place` does not have, or cannot have."""
        self.variation.check(place)
        for count in self.devices:
            try:
                catalogue.resized(place, count)
            except ValueError as error:
                raise ValueError(f"{count:,} devices cannot be had: {error}") from error


def simulate(
    model: nn.Module, loss: Loss, example_batch: Any, *, cluster: Cluster | str,
    plans: Sequence[Plan | str] = ("auto",), workload: str = "",
    optimizer: MakeOptimizer | Optimizer = torch.optim.AdamW, memory: float | None = None,
    headroom: str | None = None, autocast: torch.dtype | None = None, carry: Start | None = None,
    variation: Variation | None = None, devices: Sequence[int] = (), scaling: Scaling = "strong",
    failures: Failures | None = None, price: HourlyPrice | None = None,
    spot: HourlyPrice | None = None, goal: Goal | None = None, allow: str = "", say: Say = silent,
) -> Simulated:  # fmt: skip
    """What `plans` do on `cluster`, walked from event to event; no device is needed.

    example_batch: a global batch. variation: how devices differ. devices, scaling: also on so many
    devices of the same kind, with the same rows (`strong`) or the same rows on each (`weak`).
    failures: days of training with hosts that fail. price, spot: on
    demand and not, for dollars. goal: what training goes on to. The rest as of `sm.plan`; allow:
    of plans that are `auto`.
    ValueError for a cluster or a plan that does not fit the other."""
    refuse_held(model, "simulate")
    place = cluster if isinstance(cluster, Cluster) else cluster_of(cluster)
    asked = Conditions(variation or Variation(), devices, scaling, failures, price, spot, goal)
    asked.check(place)
    began, allowed = time.perf_counter(), Allowance.parse(allow)
    rows, step = traced(model, loss, example_batch, autocast, carry, say)
    if step.opaque:
        raise ValueError(
            f"the model cannot be traced, so nothing of a step is known: {step.reason}"
        )
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())

    def on(place: Cluster, rows: int) -> PlanningSession:
        facts = DatasheetFacts.of(step, model, made, rows, place, memory, headroom, say)
        return PlanningSession(facts.allowing(allowed))

    found = _simulated(on, place, rows, plans, asked, say)
    return replace(found, workload=workload, seconds=time.perf_counter() - began)


def simulate_layers(
    profile: LayerProfile, cluster: Cluster, plans: Sequence[Plan | str] = ("auto",),
    asked: Conditions | None = None, *, rows: int | None = None, memory: float | None = None,
    headroom: str | None = None, say: Say = silent,
) -> Simulated:  # fmt: skip
    """The same of layers that somebody has measured, under plans of data parallel and stages.

    rows: of a global batch; default: the profiled ones on each device. ValueError also where the
    profile does not say how many these are."""
    asked = asked or Conditions()
    asked.check(cluster)

    def on(place: Cluster, rows: int) -> PlanningSession:
        return PlanningSession(LayerFacts.of_layers(profile, place, rows, memory, headroom))

    rows = rows or profile.needed_rows * len(cluster.ranks)
    found = _simulated(on, cluster, rows, plans, asked, say)
    return replace(found, source="layer profile")


On = Callable[[Cluster, int], PlanningSession]  # for global batches of so many rows


def _simulated(
    on: On, place: Cluster, rows: int, plans: Sequence[Plan | str], asked: Conditions, say: Say
) -> Simulated:
    began, session = time.perf_counter(), on(place, rows)
    walked = [
        _priced(_walked(session, parsed(p), rows, asked.variation), place, asked,
                _seconds_of(on, place, parsed(p), rows, say))
        for p in plans
    ]  # fmt: skip
    scales = [s for p in plans for s in _scales(on, place, parsed(p), rows, asked, say)]
    return Simulated(
        "", place, place.source, place.error_band, tuple(walked), session.problem.names,
        time.perf_counter() - began, tuple(scales), asked.price, asked.spot, asked.goal,
    )  # fmt: skip


class _Found(NamedTuple):
    planned: PlannedStep
    record: Recorded
    state: State
    messages: MessageSeconds

    @property
    def seconds(self) -> float:
        return self.record.time.seconds


def _recorded(session: PlanningSession, plan: Plan) -> tuple[Candidate, _Found | None]:
    """What is chosen for a plan, and the record of its step; None where it cannot run."""
    assert isinstance(session.facts, DatasheetFacts)
    place, walks = session.facts.cluster, list[Recorded]()

    def walk(planned: PlannedStep, profile: Profile, pieces: int) -> StepTime:
        walks.append(recorded(planned, profile, pieces, SharedLinks(place, planned)))
        return walks[-1].time

    chosen, profile = _chosen(session, plan, walk)
    if chosen.time is None or profile is None:
        return chosen, None
    planned = planned_step(session.partitions, chosen.plan)
    known = next((made for made in walks if made.time is chosen.time), None)
    if known is None:
        walk(planned, profile, chosen.time.pieces)
    state = _state(planned, profile.state_factor, place.host_of)
    return chosen, _Found(planned, known or walks[-1], state, _messages(planned, profile))


def _messages(planned: PlannedStep, profile: Profile) -> MessageSeconds:
    """Of one worker and one server, of which each has an equal part."""
    servers = planned.plan.sync.servers

    def every(rare: str) -> float:
        word = f"downpour:{servers},{rare}=999999"
        plan = replace(planned.plan, synchronisation=word)
        return exchange_seconds(replace(planned, plan=plan), profile) / servers

    if not (planned.plan.sync.asynchronous and servers):
        return NO_MESSAGES
    return MessageSeconds(every("fetch"), every("push"))


def _chosen(session: PlanningSession, plan: Plan, walk: Walk) -> tuple[Candidate, Profile | None]:
    """The plan as it is priced, or what `auto` is, by the facts that say so."""
    if plan.automatic and isinstance(session.facts, LayerFacts):
        try:
            plan = session.facts.quickest()
        except ValueError as error:
            return Candidate(plan, None, (), False, str(error)), None
    if not plan.automatic:
        return session.priced(plan, None, walk)
    choice = session.choose(session.survey())
    return choice.chosen, choice.profile


def _walked(
    session: PlanningSession, plan: Plan, rows: int, variation: Variation
) -> SimulatedPlan:
    chosen, found = _recorded(session, plan)
    if found is None:
        return SimulatedPlan(chosen.plan, rows, None, fits=False, reason=chosen.reason)
    step = simulated(found.planned, found.record, variation, found.messages)
    peaks = tuple(float(m.peak) for m in chosen.memory)
    return SimulatedPlan(chosen.plan, rows, step, peaks, chosen.fits, chosen.reason, found.state)


def _state(planned: PlannedStep, factor: float, host_of: Sequence[int]) -> State:
    """factor: bytes of the optimizer's states for one of a parameter. host_of: ranks."""

    @cache
    def kept(shards: int, positions: Sequence[int]) -> bool:
        """Whether each shard is on two hosts; its copies are so many positions apart."""
        hosts = [host_of[planned.ranks[p]] for p in positions]
        return all(len({*hosts[shard::shards]}) > 1 for shard in range(shards))

    of = planned.holdings.values()
    whole = sum(h.tensor.bytes * (1.0 + factor * h.tensor.trainable) for h in of)
    held = (held_bytes(planned.held(its[0]), factor, ()) for its in planned.positions)
    twice = all(
        not h.parted and kept(h.layout.tensor if h.placement.sharded else 1, h.positions)
        for h in of
    )
    return State(whole, max(sum(kinds.values()) for kinds in held), twice)


_SecondsOf = Callable[[int], float]  # a step on so many hosts


def _seconds_of(on: On, place: Cluster, plan: Plan, rows: int, say: Say) -> _SecondsOf:
    """Of the plan, planned anew for so many of the hosts; infinite where it cannot run there."""
    each = -(-len(place.ranks) // len(place.hosts))

    @cache
    def seconds(hosts: int) -> float:
        say(f"{plan} on {hosts} of {len(place.hosts)} hosts")
        try:
            chosen, found = _recorded(on(catalogue.resized(place, hosts * each), rows), plan)
        except ValueError:
            return inf
        return found.seconds if found and chosen.fits else inf

    return seconds


def _priced(
    plan: SimulatedPlan, place: Cluster, asked: Conditions, seconds_of: _SecondsOf
) -> SimulatedPlan:
    """With its days of failures, and its money."""
    if (step := plan.step) is None:
        return plan
    if asked.failures is not None:
        failing = _failing(asked.failures, place, plan.state, step.seconds, seconds_of)
        plan = replace(plan, failures=failing)
    dollars, spot = (
        None if price is None else price.dollars(step.seconds, len(place.ranks))
        for price in (asked.price, asked.spot)
    )
    plan = replace(plan, dollars=dollars, spot=spot)
    if asked.goal is None:
        return plan
    useful = plan.rows / plan.samples_per_second if plan.samples_per_second else inf
    rates = (
        None if price is None else price.dollars(1.0, len(place.ranks))
        for price in (asked.price, asked.spot)
    )
    return replace(plan, until=asked.goal.reached(plan.rows, useful, *rates))


def _failing(
    asked: Failures, place: Cluster, state: State, step: float, seconds_of: _SecondsOf
) -> Failing:
    hosts, moving = len(place.hosts), asked.moving(place, state)
    writing = state.whole / (hosts * asked.storage) if asked.writing is None else asked.writing
    recovery = replace(
        asked.recovery, seconds=asked.recovery.seconds + moving, keeps=asked.keeps(state)
    )
    rate, taken = failures_a_second(asked.rate), asked.presence and asked.presence.mean_between
    often = hosts * rate + 1.0 / (taken or inf)
    between = 1.0 / often if often else inf
    best = max(step, best_interval(between, writing))  # no two checkpoints in a step
    interval = best if asked.interval is None else asked.interval
    powers = [1 << k for k in range(hosts.bit_length())]
    fewer = {n for power in powers for n in (hosts - power, hosts // power) if n}

    @cache
    def speed(left: int) -> float:
        """Of the quickest plan for so many or fewer (1, 2, 4 ... less, a half, a quarter ...), at
        most that of all: what is quicker on fewer could have run there at first."""
        planned = (seconds_of(n) for n in fewer if n <= left)
        return 1.0 if left >= hosts else min(1.0, step / min(planned, default=inf))

    training = Training(
        hosts, rate, Checkpoints(interval, writing), recovery, speed, asked.presence
    )
    outcomes = tuple(training.run(asked.days * DAY, seed) for seed in range(asked.seeds))
    return Failing(between, interval, best, outcomes, writing, recovery.down)


def _scales(
    on: On, place: Cluster, plan: Plan, rows: int, asked: Conditions, say: Say
) -> list[Scale]:
    """Of a plan on each number of devices, beside one device with the same rows."""
    made, alone = [], Plan.parse("single")
    single = cache(lambda of: _recorded(on(catalogue.resized(place, 1), of), alone))
    for count in asked.devices:
        of = rows if asked.scaling == "strong" else max(1, rows * count // len(place.ranks))
        (one, by_one), (chosen, found) = single(of), single(of)
        if count > 1:
            chosen, found = _recorded(on(catalogue.resized(place, count), of), plan)
        if found is None or by_one is None:
            say(f"{plan} on {count} devices is left out: {chosen.reason or one.reason}")
            continue
        whole, into = by_one.seconds, parts(by_one.record, by_one.seconds)
        seconds = found.seconds
        beyond = {n: s - into[n] / count for n, s in parts(found.record, seconds).items()}
        del beyond["slower"]  # devices are alike
        made.append(Scale(str(plan), str(chosen.plan), count, of, seconds, whole / count, beyond))
    return made
