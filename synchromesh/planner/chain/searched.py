"""What the search was asked, and the plans of what it found."""

from collections.abc import Sequence
from dataclasses import dataclass

from synchromesh.planner.chain.assemble import AS_IS, Assembled, Saving, assemble
from synchromesh.planner.chain.search import search
from synchromesh.planner.chain.walk import Found
from synchromesh.planner.problem import PlanningProblem
from synchromesh.planner.uniform import Uniform
from synchromesh.planner.wording import worded
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

ALTERNATIVES = 4  # plans of the search that are priced exactly besides its best; chosen


@dataclass(frozen=True)
class Searched:
    """What the search was asked and what it found."""

    assembled: Assembled
    limit: float  # bytes of a device
    found: Found

    def plans(self, planned: PlanningProblem) -> list[Plan]:
        """The best plan and its alternatives, in order."""
        return [
            worded(
                planned.names,
                self.layouts(other.choice),
                planned.modules,
                free=planned.step.coupling,
            )
            for other in (self.found, *self.found.alternatives)
        ]

    def layouts(self, choice: Sequence[int]) -> tuple[Layout, ...]:
        """The layout of each component under the options of `choice`."""
        return tuple(layouts[k] for layouts, k in zip(self.assembled.layouts, choice, strict=True))

    def choice(self, planned: PlanningProblem, plan: Plan) -> tuple[int, ...] | None:
        """The options that are the plan's layouts; None where one of them was not offered."""
        if len(planned.ranks(plan)) != planned.devices or plan.stages:
            return None
        wanted, offered = planned.layouts(plan), self.assembled.layouts
        if not all(layout in layouts for layout, layouts in zip(wanted, offered, strict=True)):
            return None
        return tuple(layouts.index(x) for x, layouts in zip(wanted, offered, strict=True))


def searched(
    uniform: Uniform, profile: Profile, limit: float, savings: Sequence[Saving] = AS_IS
) -> Searched:
    """The search over the degrees of `uniform`, with at most `limit` bytes on a device. savings:
    in which ways each component may save memory. Unmeasured where the profile lacks every layout
    of a component."""
    assembled = assemble(uniform, profile, savings)
    most = ALTERNATIVES if savings == AS_IS else 0  # those save a little more or less
    return Searched(assembled, limit, search(assembled.problem, limit, most))
