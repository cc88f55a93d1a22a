"""An adaptation: how the plan of a trainer changes while it trains."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.decision import Decision
from synchromesh.adapt.live_run import LiveRun
from synchromesh.adapt.observer import NO_COST, Observer
from synchromesh.checkpoint.switch import Moved
from synchromesh.planner.candidate import Candidate
from synchromesh.training.execution import Execution
from synchromesh.values.plan import Plan


class Adaptation:
    """Switches plans where what steps take says so; from `begin` on. All ranks call alike."""

    def __init__(self, execution: Execution, switch: Callable[[Plan], Moved]) -> None:
        self._execution, self._switch = execution, switch
        self._observer: Observer | None = None

    @property
    def adapter(self) -> Adapter | None:
        return None if self._observer is None else self._observer.adapter

    @property
    def cost(self) -> tuple[int, ...]:
        """What the last step took here, as all ranks are to know it with the next one."""
        return NO_COST if self._observer is None else self._observer.cost

    def begin(self, predict: Callable[[], Candidate]) -> None:
        """Measures what is not known first. predict: the plan in force, if it was not chosen."""
        planning = self._execution.planning
        profile = planning.surveyed(self._execution.active.step)
        candidates = planning.candidates() or (predict(),)
        self._observer = Observer(Adapter(profile, candidates, time.monotonic()))

    def collect(self, costs: Sequence[tuple[int, ...]]) -> Decision | None:
        """costs: of the last step, by rank. The last switch, once its effect is known."""
        if self._observer is None:
            return None
        return self._observer.collect(costs, self._execution.active.groups.ranks)

    def note(
        self, seconds: float, waited: float, rows: int, steps: int, to_come: int
    ) -> Decision | None:
        """Notes what a step on `rows` global rows took, of which it waited a part for other
        ranks; the adapter acts on a drift. steps: done; to_come: 0 where that is not known."""
        observer, active = self._observer, self._execution.active
        if observer is None:
            return None
        plan, planning = active.plan, self._execution.planning
        pieces = self._execution.pieces
        if observer.resized(rows, planning.rows):
            planning.rows = rows
        if rows == planning.rows and pieces.chosen is not None:
            observer.note(seconds, waited)
        if pieces.possible and plan.pieces is None:
            plan = replace(plan, pieces=pieces.chosen)  # as candidates are written
        run = LiveRun(planning.facts(active.step), plan, active.partition, self._switch)
        decision = observer.adapter.act(run, steps, to_come)
        if decision is not None and decision.measuring_seconds:
            observer.cost = NO_COST  # of a plan that may be gone
        return decision

    def restart(self) -> None:
        """Forgets what was noted of a plan that is gone, or of steps that come again."""
        if self._observer is not None:
            self._observer.restart(self._execution.active.plan)
