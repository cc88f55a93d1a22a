"""The choice of a plan on the ranks of this run: measure, search, measure what is new, decide.

    uniform partitions -> facts -> search (rank 0) -> best few and the plain plans
                                                   -> facts of new programs -> exact prices
Facts that are kept from an earlier run are sampled instead (`profiling/profile_cache.py`). All
ranks call alike; what rank 0 finds and prices is told to the others, so that no two can disagree.
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from synchromesh.cost.peak_memory import PeakMemory
from synchromesh.cost.step_time import StepTime, Unmeasured
from synchromesh.engine.groups import World
from synchromesh.engine.model import Model
from synchromesh.planner import candidate as pricing
from synchromesh.planner.assemble import Uniform, crossings
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.choice import (
    Choice,
    RunnerUp,
    decided,
    misfit,
    pieced,
    plain,
    runner_ups,
    searched,
    uniform,
    unsplit,
)
from synchromesh.planner.unequal import widened
from synchromesh.profiling.facts import EXTRAPOLATE, Subject, facts
from synchromesh.profiling.memory import device_bytes, process_bytes, storage_bytes
from synchromesh.profiling.profile_cache import Recall, Say
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.optimizer import coupled
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Pattern, Profile

__all__ = ["Choice", "Question", "choose", "predict", "reconsider"]

NEAR = 1.15  # times the best plan: one whose ranks have many rows is timed with them then
MISSING = 3  # of what could not be measured, that are said


@dataclass(frozen=True)
class Question:
    """What a plan is wanted for: the traced step on the ranks of a world."""

    world: World
    model: Model
    step: Step
    optimizer: Optimizer
    example: Any  # a global batch
    rows: int
    limits: Sequence[float]  # bytes of tensors that each rank may hold; see `memory_limits`
    _refused: dict[str, int] = field(default_factory=dict)  # programs, rows that do not fit

    @property
    def subject(self) -> Subject:
        tensors: Mapping[str, Tensor] = {**self.model.parameters, **self.model.buffers}
        limit = self.limits[self.world.rank]
        return Subject(
            self.step, tensors, self.example, self.optimizer, self.rows, limit, self._refused
        )

    def measured(
        self,
        partitions: Iterable[Partition],
        known: Profile | None,
        ranks: Sequence[int] | None = None,
        quick: bool = False,
        besides: Iterable[tuple[str, Pattern, int]] = (),
        rows: int = 0,
    ) -> Profile:
        """The facts of `partitions` on `ranks` (all), besides `known`, for global batches of
        `rows` (those that are planned for); quick: see `facts`."""
        where = range(self.world.size) if ranks is None else ranks
        subject = replace(self.subject, rows=rows or self.rows)
        return facts(self.world, where, subject, partitions, known, besides, quick)

    def recall(self, ranks: Sequence[int]) -> Recall:
        """The profiles that are kept, as far as they are of this question on `ranks`."""

        def whole() -> Partition:
            return self.planned.partition(Plan(LayoutSpec("data")), self.world.size)

        return Recall.open(self.world, ranks, self.subject, whole)

    @cached_property
    def coupled(self) -> str:
        """Why parameters cannot lie in pieces; nothing where they can."""
        return coupled(self.optimizer)

    @cached_property
    def uniform(self) -> Uniform:
        """The partition of the step under every tensor degree that is possible."""
        return uniform(self.planned, self.world.size, splits=not self.coupled)

    def partitions(self, plans: Iterable[Plan]) -> list[Partition]:
        """Those of the plans under which the step can be cut."""
        return self.planned.possible(plans, self.world.size)

    def solved(self, step: Step, plan: Plan) -> Partition | None:
        """The partition of `step` under `plan`, where it was needed before."""
        return self.planned.known(plan, self.world.size) if step is self.step else None

    @cached_property
    def planned(self) -> pricing.Model:
        names = self.step.chain.names
        return pricing.Model(self.step, self.rows, self.model.inside(names))


def silent(_: str) -> None:
    """Says nothing."""


def choose(question: Question, say: Say = silent) -> Choice:
    """The plan that is chosen (`decided`) of those that fit every device. ValueError where none
    does.

    say: is told, on every rank, what is measured and what is reused.
    """
    world, step = question.world, question.step
    if step.opaque or world.size == 1:
        return _only(question)
    made = question.uniform.partitions.values()
    recall = question.recall(range(world.size))
    known = recall.profile(made, say)
    if known is None:
        say(f"measuring {len(step.chain.components)} components on {world.size} ranks ...")
    profile = survey(question, known)
    found = reconsider(question, profile)
    recall.keep(found.profile, known)
    spent = found.profile.seconds
    say(f"measured for {spent:.1f} s, searched for {found.planning_seconds:.1f} s")
    _say_missing(found.profile, say)
    return found


def next_best(question: Question, found: Choice) -> tuple[RunnerUp, ...]:
    """What each component's best other layout would cost; on this rank alone, for whoever shows
    it. Nothing where that cannot be told."""
    limit = min(question.limits)
    with suppress(ValueError):
        result = searched(question.uniform, found.profile, limit)
        return tuple(runner_ups(question.planned, result, found.chosen.plan, limit))
    return ()


def _say_missing(profile: Profile, say: Say) -> None:
    """What could not be measured: plans that need it are priced without it, or not at all."""
    if profile.missing:
        more = len(profile.missing) - MISSING
        rest = f" (and {more} more)" if more > 0 else ""
        say(f"could not be measured: {'; '.join(profile.missing[:MISSING])}{rest}")


def survey(question: Question, known: Profile | None) -> Profile:
    """The facts that a search needs: of every degree, and of what may cross between them."""
    parts = question.uniform
    return question.measured(parts.partitions.values(), known, besides=crossings(parts))


def reconsider(question: Question, profile: Profile, current: Plan | None = None) -> Choice:
    """The choice from facts that are known; what is new in the best plans is measured.

    current: the plan in force, which is priced among the candidates.
    """
    world, planned, limits = question.world, question.planned, question.limits
    began, measured = time.perf_counter(), profile.seconds
    plans = _proposed(question, profile, min(limits), current)
    whole = [p for p in plans if len(p.devices(world.size)) == world.size]
    profile = question.measured(question.partitions(whole), profile)
    found = _priced(question, plans, profile)
    more = _widened(question, found, profile)
    profile = _odd(question, more, profile)
    found += _priced(question, more, profile)
    sure: set[Plan] = set()
    while near := _near(found, world.size, sure):
        # its ranks have more rows than a program was timed with: no guess where it counts
        sure.add(near)
        profile = question.measured(
            question.partitions([near]), profile, near.devices(world.size),
            quick=current is not None, rows=ceil(question.rows * _uneven(near)),
        )  # fmt: skip
        found = _priced(question, [*plans, *more], profile)
    guessed = [p for p in more if p.ranks is not None]
    found = [c for c in found if c.time is not None or c.plan not in guessed]
    found = [pieced(planned, c, world.size) for c in found]
    found = decided([*found, *unsplit(world.size, question.coupled)])
    spent = time.perf_counter() - began - (profile.seconds - measured)
    if all(c.time is None for c in found):
        return _unpriced(question, found, profile)
    if not found[0].fits:
        raise ValueError(misfit(found, limits, question.rows))
    return Choice(tuple(found), profile, spent)


def _said(world: World, find: Callable[[], Any]) -> Any:
    """What rank 0 finds, in JSON: the others need not look for it, and cannot disagree. Where it
    fails, it does on all ranks."""
    told: dict[str, Any] = {}
    fault: Exception | None = None
    if world.rank == 0:
        try:
            told = {"found": find()}
        except Exception as error:  # whatever it is: the others wait
            users = isinstance(error, ValueError)
            told, fault = {"fault": str(error) or type(error).__name__, "users": users}, error
    told = world.everyone.broadcast_json(told)
    if "fault" in told:
        raise fault or (ValueError if told["users"] else RuntimeError)(told["fault"])
    return told["found"]


def _proposed(
    question: Question, profile: Profile, limit: float, current: Plan | None
) -> list[Plan]:
    """The best of the search, the plain plans and the one in force."""
    world = question.world

    def texts() -> list[str]:
        try:
            found = searched(question.uniform, profile, limit).plans(question.planned)
        except Unmeasured:  # no layout of a component could be measured: the plain plans are left
            found = []
        known = plain(world.size, splits=not question.coupled)
        proposed = [*found, *known, *([] if current is None else [current])]
        return list(dict.fromkeys(str(p) for p in proposed))

    return [Plan.parse(text) for text in _said(world, texts)]


def _widened(question: Question, found: Sequence[Candidate], profile: Profile) -> list[Plan]:
    """Further plans, with unequal rows and on fewer devices."""
    world = question.world

    def texts() -> list[str]:
        return [str(p) for p in widened(question.planned, found, world.size, profile)]

    return [Plan.parse(text) for text in _said(world, texts)]


def _priced(question: Question, plans: Sequence[Plan], profile: Profile) -> list[Candidate]:
    """The candidates of `plans`, which all ranks have cut the step for."""
    world, limits = question.world, question.limits
    question.partitions(plans)

    def prices() -> list[dict[str, Any]]:
        found = (price(question.planned, p, world.size, profile, limits) for p in plans)
        return [
            {
                "time": None if c.time is None else asdict(c.time),
                "memory": [asdict(m) for m in c.memory],
                "fits": c.fits,
                "reason": c.reason,
            }
            for c in found
        ]

    return [
        Candidate(
            plan,
            None if told["time"] is None else StepTime(**told["time"]),
            tuple(PeakMemory(**m) for m in told["memory"]),
            told["fits"],
            told["reason"],
        )
        for plan, told in zip(plans, _said(world, prices), strict=True)
    ]


def _odd(question: Question, plans: Sequence[Plan], profile: Profile) -> Profile:
    """The profile with the collectives of plans on numbers of ranks that no layout of all has."""
    world = question.world.size
    for plan in plans:
        if plan.ranks is not None and (question.coupled or world % len(plan.ranks)):
            profile = question.measured(question.partitions([plan]), profile, plan.ranks)
    return profile


def _near(found: Sequence[Candidate], world: int, sure: Collection[Plan]) -> Plan | None:
    """Of the plans whose ranks have more rows than programs were timed with, and that are not in
    `sure`, the quickest, if it may be the best of all."""
    known = [c for c in found if _largest(c.plan, world) <= EXTRAPOLATE or c.plan in sure]
    guessed = [c for c in found if c.fits and c not in known]
    best = min(guessed, key=lambda c: c.seconds, default=None)
    least = min((c.seconds for c in known if c.fits), default=float("inf"))
    return None if best is None or best.seconds > NEAR * least else best.plan


def _uneven(plan: Plan) -> float:
    """The largest share of rows over an equal one."""
    return max(plan.rows) * len(plan.rows) / sum(plan.rows) if plan.rows else 1.0


def _largest(plan: Plan, world: int) -> float:
    """The most rows of a rank over those of an equal block on all ranks."""
    return _uneven(plan) * world / len(plan.devices(world))


def predict(
    question: Question, plan: Plan, known: Profile | None = None, say: Say = silent
) -> tuple[Candidate, Profile]:
    """The prediction of a given plan, with the measurements that it takes.

    known: of this run, on any ranks; what is measured besides it is not kept for other runs.
    """
    world, planned = question.world, question.planned
    if question.step.opaque:
        return Candidate(plan, None, (), True, "the model runs whole: nothing was measured"), (
            known or Profile(world.size)
        )
    ranks = plan.devices(world.size)
    made = planned.partition(plan, world.size)
    if known is None:
        profile = _measured_once(question, made, ranks, say)
    else:
        profile = question.measured([made], known, ranks=ranks)
    return price(planned, plan, world.size, profile, question.limits), profile


def _measured_once(question: Question, made: Partition, ranks: Sequence[int], say: Say) -> Profile:
    """The facts of one partition: those that are kept, and those that are missing there."""

    def likely() -> Iterator[Partition]:
        yield made
        yield from question.uniform.partitions.values()  # what `auto` has measured

    recall = question.recall(ranks)
    known = recall.profile(likely(), say)
    profile = question.measured([made], known, ranks=ranks)
    recall.keep(profile, known)
    say(f"measured for {profile.seconds:.1f} s")
    _say_missing(profile, say)
    return profile


def memory_limits(world: World, held: Iterable[Tensor]) -> list[float]:
    """Bytes of tensors that each rank may hold: its device's share, less what the process has
    besides tensors. held: the tensors that are there already.
    """
    ranks_here = max(1, _ranks_here(world))
    mine = device_bytes(world.device)
    if world.device.type != "cuda":
        besides = process_bytes() - storage_bytes(x for x in held if not x.is_meta)
        mine = mine // ranks_here - max(0, besides)
    return [float(n) for n in world.everyone.all_gather_json(max(0, int(mine)))]


def _ranks_here(world: World) -> int:
    import socket

    names = world.everyone.all_gather_json(socket.gethostname())
    return names.count(names[world.rank])


def _unpriced(question: Question, found: Sequence[Candidate], profile: Profile) -> Choice:
    """`data` where nothing is known of any plan: training warns, it does not fail for it."""
    reason = found[0].reason or "nothing could be measured"
    if question.world.rank == 0:
        missing = "; ".join(profile.missing[:2])
        warnings.warn(
            f"no plan could be predicted, so it is `data` ({reason}; {missing})", stacklevel=2
        )
    plan = Plan(LayoutSpec("data"))
    return Choice((Candidate(plan, None, (), True, reason),), profile, 0.0)


def _only(question: Question) -> Choice:
    """The one plan of a model that could not be traced, or on one device."""
    devices = question.world.size
    plan = Plan(LayoutSpec("data" if devices > 1 else "single"))
    reason = f"the model runs whole: {question.step.reason}" if devices > 1 else "one device"
    return Choice((Candidate(plan, None, (), True, reason),), Profile(devices), 0.0)
