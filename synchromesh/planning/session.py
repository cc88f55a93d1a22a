"""A planning session: what is asked of a problem and its facts, measured or estimated alike."""

from collections.abc import Iterable, Sequence

from synchromesh.cost.step_time import Walk, step_time
from synchromesh.planner.candidate import Candidate, demands, price
from synchromesh.planner.choice import Choice
from synchromesh.planner.decision.decide import decide, survey
from synchromesh.planner.decision.memory import misfit
from synchromesh.planner.problem import Facts
from synchromesh.planner.stages.cuts import cut_plan, measured_work, unstaged
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


class PlanningSession:
    """Questions about the plans of a problem; `known` facts are added to. All ranks call alike."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.partitions = facts, facts.partitions
        self.problem = facts.partitions.problem

    def survey(self, known: Profile | None = None) -> Profile:
        return survey(self.facts, known)

    def choose(
        self, known: Profile, current: Plan | None = None, given: Sequence[Candidate] = (),
        explained: bool = False,
    ) -> Choice:  # fmt: skip
        return decide(self.facts, known, current, explained, given)

    def refusal(self, choice: Choice) -> str:
        """Why nothing can be chosen, and what would fit; nothing where the chosen plan fits."""
        if choice.chosen.fits:
            return ""
        return self.facts.agreed(lambda: [misfit(choice, self.partitions)], str, str)[0]

    def cut(self, plan: Plan, known: Profile | None) -> Plan:
        """`plan`, which leaves its cuts open, with stages of level work. ValueError where the
        model has fewer components, or its stages do not divide the devices."""
        alone = unstaged(plan, self.problem.devices)
        profile = self.profile(alone, known, plan.micro_batches)

        def find() -> list[Plan]:
            work = measured_work(self.partitions, plan, profile)
            return [cut_plan(self.problem.step, plan, work, self.problem.devices)]

        return self.facts.agreed(find, str, Plan.parse)[0]

    def predict(
        self, plan: Plan, known: Profile | None, walk: Walk = step_time
    ) -> tuple[Candidate, Profile]:
        """What `plan` takes, and the facts that say so. ValueError where it has no partition."""
        profile = self.profile(plan, known, plan.micro_batches)
        return price(self.partitions, plan, profile, walk), profile

    def profile(self, plan: Plan, known: Profile | None, micro_batches: int) -> Profile:
        """`known` with the facts of a plan whose cuts are settled."""
        ranks, partition = self.problem.ranks(plan), self.partitions.partition(plan)
        more, micro = demands(self.partitions, plan), (micro_batches,)
        return self.facts.profile([partition], known, ranks, besides=more, micro_batches=micro)

    def priced(
        self, plan: Plan, known: Profile | None, walk: Walk = step_time
    ) -> tuple[Candidate, Profile | None]:
        """As `predict`, of a plan that may leave cuts open; where it cannot run, why."""
        try:
            if plan.open_cuts:
                plan = self.cut(plan, known)
            return self.predict(plan, known, walk)
        except ValueError as error:
            return Candidate(plan, None, (), False, str(error)), known


def quickest(candidates: Iterable[Candidate]) -> Candidate:
    """The quickest by prediction of those that fit; if none does, one with its reason."""
    return min(candidates, key=lambda c: (not c.fits or c.time is None, c.seconds))


def parsed(plan: Plan | str) -> Plan:
    return Plan.parse(plan) if isinstance(plan, str) else plan
