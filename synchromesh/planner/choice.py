"""The choice of a plan among priced candidates: which one is taken, and the reasons."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from synchromesh.planner.candidate import Candidate
from synchromesh.planner.problem import Headroom
from synchromesh.trace.step import Step
from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

# A plan must be predicted this much quicker than one of fewer words. Predictions are off by 6 to
# 7 % on average; of plans nearer to each other than 3 % the quicker one is a guess.
MARGIN = 0.03
PLAIN = ("single", "data", "tensor", "hybrid")


@dataclass(frozen=True)
class InexactTuning:
    """Of plans that compute something else than one device."""

    # by how much one must be predicted quicker than those that do not: the step of one that sends
    # less was off by up to 22 % in a lab (benchmarks/README.md), and accuracy pays for it
    margin: float = 0.25
    shown: int = 9  # numbers of such plans in a sentence; chosen


INEXACT = InexactTuning()


@dataclass(frozen=True)
class Choice:
    candidates: tuple[Candidate, ...]  # the chosen one first, then by time
    profile: Profile
    planning_seconds: float  # of the search alone
    components: "tuple[RunnerUp, ...]" = ()  # where asked for
    components_of: Plan | None = None  # the plan that gives `components` their layouts: the search
    # of runners-up knows plans of one stage on all devices, of which the chosen one need not be
    headroom: Headroom | None = None  # of the device that has the least memory for plans

    @classmethod
    def only(cls, plan: Plan, reason: str, profile: Profile) -> "Choice":
        """The choice of the one plan that there is, of which nothing is predicted."""
        return cls((Candidate(plan, None, (), True, reason),), profile, 0.0)

    @classmethod
    def untraced(cls, step: Step, profile: Profile) -> "Choice":
        """`data` for a model that could not be traced; `single` if that may train another loss."""
        asked = f"; {step.doubt}: return (sum, weight), and rows are divided" if step.doubt else ""
        plan = Plan(LayoutSpec("single" if step.doubt else "data"))
        return cls.only(plan, f"the model runs whole: {step.reason}{asked}", profile)

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def of(self) -> str:
        """Of which plan `components` are, where it is not the chosen one; else nothing."""
        if self.components_of in (None, self.chosen.plan):
            return ""
        return (
            f"of {str(self.components_of)!r}, the search's best plan of one stage on all devices"
        )

    @property
    def why(self) -> str:
        """What decides, for a reader of the candidates, which are counted from 1: how the best
        other one differs, on more devices if some are idle; what a quicker one lacks."""
        best, world = self.chosen, self.profile.devices
        others = [(n, c) for n, c in enumerate(self.candidates[1:], 2) if c.time is not None]
        if best.time is None or not best.fits or not others:
            return ""
        used = len(best.plan.devices(world))
        idle = f", and leaves {world - used} of {world} devices idle" if used < world else ""
        said = [f"plan 1 has the {best.reason}{idle}"]
        fitting = [(len(c.plan.devices(world)) <= used < world, n, c) for n, c in others if c.fits]
        if fitting:
            _, n, other = min(fitting, key=lambda x: x[:2])
            said.append(f"plan {n} is {other.reason}")
        quicker = ((n, c) for n, c in others if not c.fits and c.seconds < best.seconds)
        for n, c in islice(quicker, 1):
            lack, _, beside = c.reason.partition("; ")
            said.append(f"plan {n} would be {beside}, but {lack}")
        return "; ".join(said)

    @property
    def of_accuracy(self) -> str:
        """A sentence where some of the plans compute something else; else nothing."""
        odd = [str(n) for n, c in enumerate(self.candidates, 1) if not c.plan.exact]
        if not odd:
            return ""
        named = ", ".join(odd[: INEXACT.shown]) + " and others" * (len(odd) > INEXACT.shown)
        return (
            f"plans that compute something else than one device ({named}): what that costs in "
            "accuracy is not in their times, unless a study (`synchromesh compare`) measured it"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "candidates": [c.to_dict() for c in self.candidates],
            "chosen": str(self.chosen.plan), "why": self.why,
            "of_accuracy": self.of_accuracy, "headroom": self.headroom and asdict(self.headroom),
            "planning_seconds": self.planning_seconds, "measuring_seconds": self.profile.seconds,
            "components": [c.to_dict() for c in self.components],
            "components_of": None if self.components_of is None else str(self.components_of),
        }  # fmt: skip


@dataclass(frozen=True)
class RunnerUp:
    """A component under a plan, and the best plan in which it has another layout. seconds: what a
    step would take more by the search's sums; None: no other layout was found."""

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
            "component": self.component, "layout": str(self.layout),
            "runner_up": None if self.other is None else str(self.other),
            "runner_up_seconds": self.seconds,
        }  # fmt: skip


def decided(candidates: Sequence[Candidate], allowed: Allowance = NOTHING) -> list[Candidate]:
    """Candidates with the chosen one first, and reasons. Of those that are less than `MARGIN`
    slower than the quickest, the plainest is taken: predictions are not that exact. One that
    computes something else than one device is taken where it is allowed, and quicker than all
    others by `INEXACT.margin`."""
    order = sorted(candidates, key=lambda c: (not c.fits, c.seconds, str(c.plan)))
    quickest = _quickest([c for c in order if allowed.covers(c.plan)] or order)
    near = [
        c for c in order
        if c.fits and allowed.covers(c.plan) and c.plan.exact == quickest.plan.exact
        and c.seconds <= quickest.seconds * (1 + MARGIN)
    ]  # fmt: skip
    best = min(near, key=lambda c: (plainness(c.plan), c.seconds), default=quickest)
    rest = [c for c in order if c is not best]
    if best.fits:
        within = "" if best is quickest else f"fewest words within {MARGIN:.0%} of the "
        exact = " and are exact" if any(_lossy(c, best) for c in rest) else ""
        best = replace(best, reason=f"{within}least time of those that fit{exact}")
    beside = ((c, _beside(c, best)) for c in rest)
    return [best, *(replace(c, reason="; ".join(filter(None, (c.reason, x)))) for c, x in beside)]


def _quickest(order: Sequence[Candidate]) -> Candidate:
    """The first, unless an exact one that fits is about as quick."""
    exact = next((c for c in order if c.plan.exact and c.fits), order[0])
    return exact if exact.seconds <= order[0].seconds * (1 + INEXACT.margin) else order[0]


def _beside(c: Candidate, best: Candidate) -> str:
    """What a candidate's time is beside the best one's, and why."""
    if c.time is None or best.time is None:
        return ""
    more, waits = c.seconds - best.seconds, c.time.waited - best.time.waited
    if abs(more) < 0.005 * best.seconds:
        return "as quick"
    if more < 0:
        return f"{-more / best.seconds:.0%} quicker{', not exact' * _lossy(c, best)}"
    what, longer = ("waits", waits) if 2 * waits > more else ("computes", more - waits)
    return f"{more / best.seconds:.0%} slower: {what} {longer * 1e3:.1f} ms more"


def _lossy(c: Candidate, best: Candidate) -> bool:
    """Whether it is quicker than the best one, which computes what one device does."""
    return c.fits and c.seconds < best.seconds and best.plan.exact and not c.plan.exact


def saves_memory(plan: Plan) -> bool:
    return any(spec.states != "none" or spec.recompute for spec in plan.specs)


def plainness(plan: Plan) -> tuple[int, bool, bool, int]:
    """From the plainest on: fewest words; of as many, the plan that neither shards states nor
    recomputes, has one layout, and stands first in `PLAIN`."""
    name = "data" if plan.default.name == "sharded-data" else plan.default.name
    order = PLAIN.index(name) if name in PLAIN else len(PLAIN)
    return plan.words, saves_memory(plan), bool(plan.overrides), order
