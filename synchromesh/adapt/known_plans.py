"""Known plans: what steps under each take by present conditions, predicted and as they were seen.

expected of a plan    its prediction p, and p times what the plan in force takes over its own
taken for weighing    the median of its steps, where it has run under these conditions; else
                      the latter"""

from collections.abc import Sequence
from statistics import median

from synchromesh.adapt.monitor import LIMITS, Table, step_seconds
from synchromesh.planner.candidate import Candidate
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


class KnownPlans:
    """`profile`: measured last; `candidates`: what they were chosen from by it, the best first;
    `predicted`: seconds of a step; `seen`: some steps, by plan."""

    def __init__(self, profile: Profile, candidates: Sequence[Candidate] = ()) -> None:
        self.profile = profile
        self.candidates, self.predicted = candidates, _seconds(candidates)
        self.seen: dict[Plan, list[Table]] = {}

    def renew(self, candidates: Sequence[Candidate], changed: bool) -> None:
        """Predictions from what was measured again. changed: what was seen is of a time before."""
        self.candidates, self.predicted = candidates, _seconds(candidates)
        if changed:
            self.seen.clear()

    def explains(self, candidates: Sequence[Candidate], plan: Plan) -> bool:
        """Whether predictions that were made anew say that a plan takes something else now."""
        now, before = _seconds(candidates).get(plan), self.predicted.get(plan)
        return now is None or before is None or abs(now / before - 1) > LIMITS.least

    def expected(self, plan: Plan, present: Plan, now: float) -> list[float]:
        """Guesses of what a step takes under `plan`, the best last; `present` takes `now`."""
        if plan not in self.predicted:
            return []
        seconds = self.predicted[plan]
        return [seconds, seconds * now / self.predicted.get(present, now)]

    def weighed(self, plan: Plan, present: Plan, now: float) -> float:
        """What a step takes under `plan`, which is among the candidates."""
        if plan in self.seen:
            return median(map(step_seconds, self.seen[plan]))
        return self.expected(plan, present, now)[-1]


def _seconds(candidates: Sequence[Candidate]) -> dict[Plan, float]:
    return {c.plan: c.seconds for c in candidates if c.time is not None}
