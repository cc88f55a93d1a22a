"""The choice of a plan on the ranks of this run: measure, search, measure what is new, decide.

    uniform partitions -> facts -> search (rank 0) -> best few and the plain plans
                                                   -> facts of new programs -> exact prices
All ranks call alike; what rank 0 found is told to the others, so that no two can disagree.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.groups import World
from synchromesh.engine.model import Model
from synchromesh.measure.facts import Subject, facts
from synchromesh.measure.memory import device_bytes, process_bytes
from synchromesh.plan import Plan
from synchromesh.planner import candidate as pricing
from synchromesh.planner.assemble import crossings
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.choice import Choice, misfit, plain, priced, searched, uniform
from synchromesh.profile import Profile
from synchromesh.trace.step import Step
from synchromesh.word import Word

__all__ = ["Choice", "Question", "choose", "predict"]

Say = Callable[[str], None]


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
    partitions = uniform(planned, world.size)
    ranks = range(world.size)
    profile = facts(
        world, ranks, question.subject, partitions.partitions.values(), None, crossings(partitions)
    )
    began = time.perf_counter()
    texts = [str(p) for p in searched(partitions, profile, min(limits)).plans(planned)]
    spent = time.perf_counter() - began
    texts = world.everyone.broadcast_json(texts)
    plans = [Plan.parse(t) for t in dict.fromkeys([*texts, *map(str, plain(world.size))])]
    say(f"measured for {profile.seconds:.1f} s, searched for {spent:.2f} s")
    made = [
        planned.partition(p, world.size) for p in plans if len(p.devices(world.size)) == world.size
    ]
    profile = facts(world, ranks, question.subject, made, profile)
    began = time.perf_counter()
    found = priced(planned, plans, world.size, profile, limits)
    spent += time.perf_counter() - began
    chosen = world.everyone.broadcast_json(str(found[0].plan))
    found = sorted(found, key=lambda c: str(c.plan) != chosen)
    if not found[0].fits:
        raise ValueError(misfit(found, limits, question.rows))
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
