"""Which plan ranks go on with where others are lost, or come; nothing is measured for it.

    the one that was left last where there were as many ranks; else that which was prepared for
    these (planning/other_ranks.py), or that of before, where nothing was measured
      -> where it does not fit, the quickest that does of those predicted before, on other ranks
      -> `data`, or `sharded-data`, whichever has room for the state

Once steps have settled the adapter samples what these ranks take, and looks for a better one
(training/adaptation.py)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from synchromesh.launcher.generation import Generation
from synchromesh.planner.choice import Choice
from synchromesh.planner.decision.memory import Shortage
from synchromesh.planning.other_ranks import Before, remade
from synchromesh.trace.step import Step
from synchromesh.training.active_plan import renumbered
from synchromesh.training.adaptation import Adaptation
from synchromesh.training.execution import Execution
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


class NextPlan:
    """Of a trainer. plan: the one to go on with, as far as this rank knows."""

    FALL_BACKS: ClassVar = Plan(LayoutSpec("data")), Plan(LayoutSpec("sharded-data"))

    def __init__(self, execution: Execution, adaptation: Adaptation) -> None:
        self._execution, self._adaptation = execution, adaptation
        self.plan = self.FALL_BACKS[0]
        # the plan, where one is in force that was left of it, and that one
        self._wanted: tuple[Plan, Plan] | None = None
        self._known: list[Plan] = []  # of the latest predictions, the best first
        self._adapted: dict[int, Plan] = {}  # where there were so many ranks
        self._prepared: Mapping[Before, Plan] = {}  # while there were the ranks of before
        self._before: Before = ()  # of each rank, which it was then
        self._size = 0  # ranks then, and how the plan was chosen
        self._choice: Choice | None = None
        self._profile: Profile | None = None  # of the ranks of before
        self.why = ""  # the plan that is in force behind `shift` is

    def begin(self) -> None:
        """Before ranks meet."""
        execution, active = self._execution, self._execution.latest
        self.plan = execution.plan if execution.in_force else active.plan
        planning = execution.planning
        self._prepared = planning.prepared.under(self.plan, planning.rows)
        self._before = tuple(range(execution.world.size))
        self._size, self._choice = execution.world.size, planning.choice
        adaptation = self._adaptation
        self._profile = adaptation.profile
        self._known = [p for p in adaptation.known if _free(p)] or self._known
        if self._wanted is not None and active.plan == self._wanted[1]:
            self.plan = self._wanted[0]
        elif adaptation.trying:  # which is no choice
            self.plan = next(iter(self._known), self.plan)
        elif planning.prepared.plans and _free(self.plan):
            self._adapted[execution.world.size] = self.plan

    def renumber(self, generation: Generation) -> None:
        self.plan = renumbered(self.plan, generation.before[: generation.stay])
        new, before = Generation.NEW, self._before
        self._before = tuple(new if r == new else before[r] for r in generation.before)

    def told(self, stay: int) -> dict[str, Any]:
        """To those that go on with this rank's state, `stay` ranks."""
        alone = self._size == 1 < stay and self._choice is not None
        plans = {
            f"that of {stay} ranks before": self._adapted.get(stay),
            "prepared for these ranks": self._prepared.get(self._before[:stay]),
            "`single` was chosen for one rank": self.FALL_BACKS[0] if alone else None,
            "that of before": self.plan,
        }
        why, plan = next((why, plan) for why, plan in plans.items() if plan is not None)
        profile = self._profile and remade(self._profile, self._before).to_dict()
        known = [str(p) for p in self._known]
        return {"plan": str(plan), "known": known, "why": why, "profile": profile}

    def shift(self, step: Step, told: dict[str, Any], stay: int) -> None:
        """Makes it the active plan, on the ranks that stay. RuntimeError where none has room."""
        self._wanted, size, wanted = None, self._execution.world.size, Plan.parse(told["plan"])
        self.why, profile = told["why"], told["profile"]
        self._execution.planning.profile = profile and Profile.from_dict(profile)
        only = tuple(range(stay)) if stay < size else None
        try:
            if only is not None and not _free(wanted):
                raise ValueError  # it says which ranks, of those that stay and leave
            self._execution.shift(replace(wanted, ranks=only or wanted.ranks), step)
        except ValueError:
            word = replace(self.FALL_BACKS[0], synchronisation=wanted.synchronisation)
            plans = [*[word] * word.sync.asynchronous, *map(Plan.parse, told["known"])]
            self._fall_back(step, plans, only, wanted)
        if self._execution.active.plan != wanted:
            self._wanted = wanted, self._execution.active.plan

    def _fall_back(
        self, step: Step, plans: Sequence[Plan], only: tuple[int, ...] | None, wanted: Plan
    ) -> None:
        """The first that fits, on `only` these ranks, with room for parameters, gradients and
        states of the optimizer. RuntimeError, with the numbers, where none has it."""
        execution, planning = self._execution, self._execution.planning
        lacks = "no plan for any number of ranks divides this model"
        for plan in [*plans, *self.FALL_BACKS]:
            plan = replace(plan, ranks=only)
            with suppress(ValueError):  # ranks that do not divide, states that cannot be sharded
                held = execution.check.held(plan, step, execution.world.size)
                known = planning.memory.held(plan, held)
                shortage = Shortage.of(known, planning.memory.limits, planning.rows)
                if shortage is None:
                    execution.shift(plan, step)
                    self.why = f"{wanted} does not fit"
                    return
                lacks = shortage.clause
        raise RuntimeError(f"{lacks}: go on with the newest checkpoint on more devices, --resume")


def _free(plan: Plan) -> bool:
    """Whether it names no ranks, and gives none its rows: it is for any number of them."""
    return plan.ranks is None and plan.rows is None and not plan.stages
