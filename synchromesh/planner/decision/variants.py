"""Variants: plans that compute something else than one device, where that is allowed.

They differ from an exact plan in how workers agree, or in what gradients are sent as
(values/allowance.py), so that they take no less than what it takes without its traffic. So those
are made of the plan that is best so far, of `data`, and of the ones of least

    seconds - seconds of waiting                                        on all devices

and each is priced exactly, as all plans are."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from synchromesh.planner.candidate import Candidate, demands
from synchromesh.planner.problem import Demand, PartitionCache, PlanningProblem
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class VariantTuning:
    """Chosen: exact plans that variants are made of, besides the best one and `data`; of each
    there are up to eight."""

    bases: int = 3


TUNING = VariantTuning()


def variants(problem: PlanningProblem, candidates: Sequence[Candidate]) -> list[Plan]:
    """Of candidates, the best one first, those that are allowed."""
    first, everyone = candidates[0].plan, range(problem.devices)
    fitting = [
        c for c in candidates
        if c.fits and c.time is not None and [*everyone] == sorted(problem.ranks(c.plan))
    ]  # fmt: skip
    order = sorted(fitting, key=lambda c: c.seconds - (c.time.waited if c.time else 0.0))
    known = {c.plan for c in fitting}
    bases = (first, Plan(LayoutSpec("data")), *(c.plan for c in order[: TUNING.bases]))
    made = (
        plan
        for base in bases
        if base in known
        for plan in problem.allowed.variants(base, _workers(problem, base))
        if not plan.sync.asynchronous or _may_part(problem)
    )
    return list(dict.fromkeys(made))


def demanded(partitions: PartitionCache, plans: Sequence[Plan]) -> Iterator[Demand]:
    """Collectives of those that can be; `price` says of the rest why not."""
    for plan in plans:
        with suppress(ValueError):
            yield from demands(partitions, plan)


def _workers(problem: PlanningProblem, plan: Plan) -> int:
    return max(layout.data for layout in problem.layouts(plan))


def _may_part(problem: PlanningProblem) -> bool:
    """Whether workers may go on without each other: no row depends on another one's, and servers
    can keep every parameter."""
    parameters = (p for c in problem.step.chain.components for p in c.parameters if p.trainable)
    return not problem.step.coupling and all(p.shape for p in parameters)
