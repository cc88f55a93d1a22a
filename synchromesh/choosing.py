"""The choice of a plan on the ranks of this run: measure, search, measure what is new, decide.

    uniform partitions -> facts -> search (rank 0) -> best few and the plain plans
                                                   -> facts of new programs -> exact prices
All ranks call alike; what rank 0 found is told to the others, so that no two can disagree.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.groups import World
from synchromesh.engine.model import Model
from synchromesh.measure.facts import Subject, facts
from synchromesh.measure.memory import device_bytes, process_bytes
from synchromesh.plan import Plan
from synchromesh.planner import candidate as pricing
from synchromesh.planner.assemble import Uniform, assemble, crossings, degrees
from synchromesh.planner.candidate import Candidate, price, with_pieces
from synchromesh.planner.chain import search
from synchromesh.planner.wording import worded
from synchromesh.profile import Profile
from synchromesh.trace.partition import overlaps
from synchromesh.trace.step import Step
from synchromesh.word import Word

MARGIN = 0.02  # a mixed plan must be predicted this much quicker than a plain one
ALTERNATIVES = 4  # of the search, priced exactly besides the best
Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """What was considered and chosen, and on which facts."""

    candidates: tuple[Candidate, ...]  # the chosen one first, then by time
    profile: Profile
    planning_seconds: float  # of the search alone

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": [c.to_dict() for c in self.candidates],
            "chosen": str(self.chosen.plan),
            "planning_seconds": self.planning_seconds,
            "measuring_seconds": self.profile.seconds,
        }


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for: the traced step on the ranks of a world."""

    world: World
    model: Model
    step: Step
    optimizer: Optimizer
    example: Any  # a global batch
    rows: int

    @property
    def subject(self) -> Subject:
        tensors: Mapping[str, Tensor] = {**self.model.parameters, **self.model.buffers}
        return Subject(self.step, tensors, self.example, self.optimizer, self.rows)

    @property
    def planned(self) -> pricing.Model:
        names = self.step.chain.names
        return pricing.Model(self.step, self.rows, self.model.inside(names))


def choose(question: Question, say: Say = lambda _: None) -> Choice:
    """The plan of least predicted time that fits every device. ValueError where none does."""
    world, step = question.world, question.step
    planned = question.planned
    if step.opaque:
        return _opaque(question)
    limits = memory_limits(world)
    say(f"measuring {len(step.chain.components)} components on {world.size} ranks ...")
    uniform = Uniform(
        step,
        world.size,
        question.rows,
        {
            m: planned.partition(
                worded(planned.names, _uniform(planned, world.size, m)), world.size
            )
            for m in degrees(world.size)
        },
    )
    ranks = range(world.size)
    profile = facts(
        world, ranks, question.subject, uniform.partitions.values(), None, crossings(uniform)
    )
    began = time.perf_counter()
    texts = [str(p) for p in _searched(planned, uniform, profile, min(limits))]
    spent = time.perf_counter() - began
    texts = world.everyone.broadcast_json(texts)
    plans = [Plan.parse(t) for t in dict.fromkeys([*texts, *map(str, plain(world.size))])]
    say(f"measured for {profile.seconds:.1f} s, searched for {spent:.2f} s")
    made = [
        planned.partition(p, world.size) for p in plans if len(p.devices(world.size)) == world.size
    ]
    profile = facts(world, ranks, question.subject, made, profile)
    began = time.perf_counter()
    found = [price(planned, p, world.size, profile, limits) for p in plans]
    spent += time.perf_counter() - began
    found = decided([_pieced(planned, c, world.size) for c in found])
    chosen = world.everyone.broadcast_json(str(found[0].plan))
    found = sorted(found, key=lambda c: str(c.plan) != chosen)
    if not found[0].fits:
        raise ValueError(_misfit(found))
    return Choice(tuple(found), profile, spent)


def predict(
    question: Question, plan: Plan, known: Profile | None = None
) -> tuple[Candidate, Profile]:
    """The prediction of a given plan, with the measurements that it takes."""
    world, planned = question.world, question.planned
    if question.step.opaque:
        return Candidate(plan, None, (), True, "the model runs whole: nothing was measured"), (
            known or Profile(world.size)
        )
    ranks = plan.devices(world.size)
    made = planned.partition(plan, world.size)
    profile = facts(world, ranks, question.subject, [made], known)
    return price(planned, plan, world.size, profile, memory_limits(world)), profile


def _uniform(planned: pricing.Model, devices: int, degree: int) -> tuple[Any, ...]:
    from synchromesh.layout import Layout

    return (Layout(devices // degree, degree),) * len(planned.names)


def plain(devices: int) -> list[Plan]:
    """The plans that anybody would try: one device, `data`, `tensor`, uniform hybrids."""
    words = [Word("single"), Word("data")]
    words += [Word("hybrid", tensor=m) for m in degrees(devices) if 1 < m < devices]
    words += [Word("tensor")] if devices > 1 else []
    return [Plan(w) for w in words]


def _searched(
    planned: pricing.Model, uniform: Uniform, profile: Profile, limit: float
) -> list[Plan]:
    """The best plan of the search and its alternatives, in order."""
    problem = assemble(uniform, profile)
    found = search(problem, limit, ALTERNATIVES)
    plans = []
    for choice in (found.choice, *(other.choice for other in found.alternatives)):
        layouts = [
            uniform.layout(uniform.degrees[options[k].border])
            for options, k in zip(problem.components, choice, strict=True)
        ]
        plans.append(worded(planned.names, layouts, planned.inside))
    return plans


def _pieced(planned: pricing.Model, found: Candidate, world: int) -> Candidate:
    if found.time is None:
        return found
    made = planned.partition(found.plan, world)
    return with_pieces(found, overlaps(planned.step, made))


def decided(found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with the chosen one first, and reasons.

    A plain plan is preferred to a mixed one that is predicted to be less than `MARGIN` quicker:
    predictions are not that exact, and what is plain is easier to reason about.
    """
    order = sorted(found, key=lambda c: (not c.fits, c.seconds, str(c.plan)))
    best = order[0]
    if best.plan.overrides:
        near = [
            c
            for c in order
            if c.fits and not c.plan.overrides and c.seconds <= best.seconds * (1 + MARGIN)
        ]
        best = near[0] if near else best
    rest = [c for c in order if c is not best]
    told = [replace(best, reason="least predicted time" if best.fits else best.reason)]
    for c in rest:
        late = f"{c.seconds / best.seconds - 1:+.0%} time" if c.time is not None else ""
        told.append(replace(c, reason="; ".join(r for r in (c.reason, late) if r)))
    return told


def memory_limits(world: World) -> list[float]:
    """Bytes of tensors that each rank may hold: its device's share, less what the process has."""
    ranks_here = max(1, _ranks_here(world))
    mine = device_bytes(world.device)
    if world.device.type != "cuda":
        mine = mine // ranks_here - process_bytes()
    return [float(n) for n in world.everyone.all_gather_json(max(0, int(mine)))]


def _ranks_here(world: World) -> int:
    import socket

    names = world.everyone.all_gather_json(socket.gethostname())
    return names.count(names[world.rank])


def _opaque(question: Question) -> Choice:
    """The one plan of a model that could not be traced."""
    plan = Plan(Word("data" if question.world.size > 1 else "single"))
    reason = f"the model runs whole: {question.step.reason}"
    only = Candidate(plan, None, (), True, reason)
    return Choice((only,), Profile(question.world.size), 0.0)


def _misfit(found: Sequence[Candidate]) -> str:
    priced = [c for c in found if c.memory]
    if not priced:
        return f"no plan could be priced: {found[0].reason}"
    least = min(priced, key=lambda c: max(m.peak for m in c.memory))
    return (
        f"no plan fits the devices' memory; the nearest is {str(least.plan)!r}: {least.reason}. "
        "Use a smaller batch, more devices, or a smaller optimizer state"
    )
