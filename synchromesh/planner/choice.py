"""The choice of a plan from a profile: search, exact prices, the decision and its reasons.

Pure: whoever has a profile, measured on ranks or estimated from data sheets, chooses by the same
functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from synchromesh.cost.peak_memory import PeakMemory
from synchromesh.planner.assemble import Uniform, assemble, degrees
from synchromesh.planner.candidate import Candidate, Model, readable, with_pieces
from synchromesh.planner.chain import search
from synchromesh.planner.problem import Problem
from synchromesh.planner.runner_up import runners_up
from synchromesh.planner.walk import Found, found_of
from synchromesh.planner.wording import worded
from synchromesh.trace.partition.partition import overlaps
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

MARGIN = 0.05  # a plan must be predicted this much quicker than a plainer one
PLAIN = ("single", "data", "tensor", "hybrid")
ALTERNATIVES = 4  # of the search, priced exactly besides the best


@dataclass(frozen=True)
class Choice:
    """What was considered and chosen, and on which facts."""

    candidates: tuple[Candidate, ...]  # the chosen one first, then by time
    profile: Profile
    planning_seconds: float  # of the search alone
    components: "tuple[RunnerUp, ...]" = ()  # where asked for

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def alone(self) -> str:
        """A sentence where one of several devices wins; else nothing."""
        if self.chosen.plan.default.name != "single" or self.profile.devices < 2:
            return ""
        count = self.profile.devices
        others = [c for c in self.candidates if c.fits and len(c.plan.devices(count)) > 1]
        rest = "the other stays idle" if count == 2 else f"the other {count - 1} stay idle"
        if not others:
            return f"one device wins, {rest}"
        best = min(others, key=lambda c: c.seconds)
        wins = "wins" if self.chosen.seconds <= best.seconds else "is as good as more"
        return (
            f"one device {wins}, {rest}: {self.chosen.seconds * 1e3:.1f} ms a step are predicted, "
            f"and {best.seconds * 1e3:.1f} ms for the best plan on more, {str(best.plan)!r}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": [c.to_dict() for c in self.candidates],
            "chosen": str(self.chosen.plan),
            "planning_seconds": self.planning_seconds,
            "measuring_seconds": self.profile.seconds,
            "components": [c.to_dict() for c in self.components],
        }


@dataclass(frozen=True)
class Searched:
    """What the search was asked and what it found."""

    uniform: Uniform
    problem: Problem
    found: Found

    def plans(self, planned: Model) -> list[Plan]:
        """The best plan and its alternatives, in order."""
        return [
            worded(planned.names, self.layouts(other.choice), planned.inside)
            for other in (self.found, *self.found.alternatives)
        ]

    def layouts(self, choice: Sequence[int]) -> tuple[Layout, ...]:
        return tuple(
            self.uniform.layout(self.uniform.degrees[options[k].border])
            for options, k in zip(self.problem.components, choice, strict=True)
        )


@dataclass(frozen=True)
class RunnerUp:
    """A component under the chosen plan, and the best plan in which it has another layout.

    seconds: what a step would take more by the search's sums; None: no other layout was found.
    """

    component: str
    layout: Layout
    other: Layout | None
    seconds: float | None

    def __str__(self) -> str:
        if self.other is None or self.seconds is None:
            return f"{self.component}: {self.layout}, no other layout"
        return (
            f"{self.component}: {self.layout}, {self.other} would take "
            f"{self.seconds * 1e3:+.3f} ms a step"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "layout": str(self.layout),
            "runner_up": None if self.other is None else str(self.other),
            "runner_up_seconds": self.seconds,
        }


def uniform(planned: Model, devices: int, splits: bool = True) -> Uniform:
    """The step partitioned under every tensor degree of `devices`. splits: whether parameters may
    lie in pieces; else there is one degree."""
    names = planned.names
    partitions = {
        m: planned.partition(worded(names, (Layout(devices // m, m),) * len(names)), devices)
        for m in (degrees(devices) if splits else (1,))
    }
    return Uniform(planned.step, devices, planned.rows, partitions)


def plain(devices: int, splits: bool = True) -> list[Plan]:
    """The plans that anybody would try: one device, `data`, and where parameters may lie in pieces
    `tensor` and uniform hybrids."""
    words = [LayoutSpec("single"), LayoutSpec("data")]
    if not splits:
        return [Plan(w) for w in words]
    words += [LayoutSpec("hybrid", tensor=m) for m in degrees(devices) if 1 < m < devices]
    words += [LayoutSpec("tensor")] if devices > 1 else []
    return [Plan(w) for w in words]


def unsplit(devices: int, why: str) -> list[Candidate]:
    """The plain plans that split parameters, refused for a reason; none where there is none."""
    kept = plain(devices, splits=not why)
    return [Candidate(p, None, (), False, why) for p in plain(devices) if p not in kept]


def searched(uniform: Uniform, profile: Profile, limit: float) -> Searched:
    """The search over the degrees of `uniform`, with at most `limit` bytes on a device."""
    problem = assemble(uniform, profile)
    return Searched(uniform, problem, search(problem, limit, ALTERNATIVES))


def pieced(planned: Model, found: Candidate, world: int) -> Candidate:
    """The candidate with the pieces that it was priced with, where rows may walk in pieces."""
    if found.time is None:
        return found
    made = planned.partition(found.plan, world)
    return with_pieces(found, overlaps(planned.step, made))


def decided(found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with the chosen one first, and reasons.

    Of plans that are predicted to take less than `MARGIN` longer than the quickest, the plainest
    is taken: predictions are not that exact, and what is plain is easier to reason about.
    """
    order = sorted(found, key=lambda c: (not c.fits, c.seconds, str(c.plan)))
    quickest = order[0]
    near = [c for c in order if c.fits and c.seconds <= quickest.seconds * (1 + MARGIN)]
    best = min(near, key=lambda c: (plainness(c.plan), c.seconds), default=quickest)
    rest = [c for c in order if c is not best]
    told = [replace(best, reason=_why(best, quickest))]
    for c in rest:
        late = f"{c.seconds / best.seconds - 1:+.0%} time" if c.time is not None else ""
        told.append(replace(c, reason="; ".join(r for r in (c.reason, late) if r)))
    return told


def _why(best: Candidate, quickest: Candidate) -> str:
    if not best.fits:
        return best.reason
    if best is not quickest:
        return f"plainest within {MARGIN:.0%} of the least"
    return "least predicted time"


def plainness(plan: Plan) -> int:
    """From the plainest on: one device, `data`, `tensor`, a uniform hybrid, mixed layouts, unequal
    rows or some of the devices."""
    if plan.rows is not None or plan.ranks is not None:
        return len(PLAIN) + 1
    word = plan.default.name
    return PLAIN.index(word) if not plan.overrides and word in PLAIN else len(PLAIN)


def runner_ups(planned: Model, result: Searched, plan: Plan, limit: float) -> list[RunnerUp]:
    """For each component the layout of `plan` and what the best other layout would cost.

    Where the search was not offered a layout of `plan`, its own best plan is what it is told of.
    """
    choice = _choice(planned, result, plan) or result.found.choice
    chosen = found_of(result.problem, choice)
    others = runners_up(result.problem, chosen, max(limit, chosen.memory))
    rows = []
    for i, (name, layout) in enumerate(zip(planned.names, result.layouts(choice), strict=True)):
        other = others[i]
        there = None if other is None else result.layouts(other.choice)[i]
        more = None if other is None else other.seconds - chosen.seconds
        rows.append(RunnerUp(name, layout, there, more))
    return rows


def _choice(planned: Model, result: Searched, plan: Plan) -> tuple[int, ...] | None:
    """The options that are the plan's layouts; None where one of them was not offered."""
    devices = result.uniform.devices
    if len(plan.devices(devices)) != devices:
        return None
    found = []
    layouts = plan.layouts(planned.names, devices, planned.inside)
    for options, layout in zip(result.problem.components, layouts, strict=True):
        degree = result.uniform.degrees.index(layout.tensor)
        k = next((k for k, o in enumerate(options) if o.border == degree), None)
        if k is None:
            return None
        found.append(k)
    return tuple(found)


# Where nothing fits


def misfit(found: Sequence[Candidate], limits: Sequence[float], rows: int) -> str:
    """A sentence: the nearest plan, by how much it misses on which device, what would help."""
    measured = [c for c in found if c.memory]
    if not measured:
        return f"no plan could be priced: {found[0].reason}"

    def over(c: Candidate) -> tuple[float, int, PeakMemory]:
        ranks = c.plan.devices(len(limits))
        missing = [(m.peak - limits[r], r, m) for r, m in zip(ranks, c.memory, strict=True)]
        return max(missing, key=lambda x: x[0])

    nearest = min(measured, key=lambda c: over(c)[0])
    lacking, rank, memory = over(nearest)
    limit = limits[rank]
    return (
        f"no plan fits the devices' memory; the nearest is {str(nearest.plan)!r}, which needs "
        f"{readable(memory.peak)} on rank {rank} and has {readable(limit)} (lacks "
        f"{readable(lacking)}). {_remedy(memory, limit, rows)}"
    )


def _remedy(memory: PeakMemory, limit: float, rows: int) -> str:
    """What would help: what a step needs besides what is held grows with its rows."""
    if memory.resident < limit:
        fitting = int(rows * (limit - memory.resident) / (memory.peak - memory.resident))
        if fitting >= 1:
            return (
                f"A global batch of about {fitting} rows instead of {rows} would fit, or devices "
                f"of {readable(memory.peak)} each, or more devices"
            )
    return (
        f"Parameters, gradients and optimizer state alone are {readable(memory.resident)} on a "
        f"device: use more devices, devices of {readable(memory.peak)} each, or an optimizer "
        "with less state"
    )
