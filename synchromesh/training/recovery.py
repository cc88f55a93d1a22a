"""From a lost rank to the next step: those that are left meet anew, agree on a state and go on.

Every rank holds what it had when its last step was complete; one that was interrupted has changed
buffers alone, which are put back. The newest step that ranks hold whole together is the one: who
is at another counts as having nothing, and gets its parts by the moves of a switch of plans."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from synchromesh.checkpoint.json_state import from_json, to_json
from synchromesh.data.cursor import Cursor
from synchromesh.data.loaders import Loaders
from synchromesh.launcher.generation import Loss
from synchromesh.launcher.member import Member, NoGeneration
from synchromesh.training import learning_rate
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.adaptation import Adaptation
from synchromesh.training.execution import Execution
from synchromesh.values.fault import LOST, message
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan

Scheduler = LRScheduler | learning_rate.ScaledRate


@dataclass(frozen=True)
class Regrouped:
    """A generation of an elastic run that has begun behind `from_step`. seconds: from the failed
    call until the plan is in force; lost_steps: that are made again, the interrupted one left
    out."""

    from_step: int
    ranks: int
    plan: str
    lost: tuple[Loss, ...]
    recovered_seconds: float
    lost_steps: int

    @property
    def cause(self) -> str:
        return "; ".join(map(str, self.lost))

    def to_dict(self) -> dict[str, Any]:
        """As `train --json` and a run's log have it."""
        noticed = max((loss.noticed_seconds for loss in self.lost), default=0.0)
        return {
            "from_step": self.from_step, "hosts": 1, "ranks": self.ranks, "plan": self.plan,
            "cause": self.cause, "culprit": [loss.rank for loss in self.lost],
            "noticed_seconds": noticed, "recovered_seconds": round(self.recovered_seconds, 3),
            "lost_steps": self.lost_steps, "state_from": "survivors",
        }  # fmt: skip

    def __str__(self) -> str:
        again = f"; {self.lost_steps} steps are made again" if self.lost_steps else ""
        return (
            f"{self.cause}: {self.ranks} ranks go on behind step {self.from_step} under plan "
            f"{self.plan}, after {self.recovered_seconds:.2f} s{again}"
        )


class Survival:
    """How a trainer goes on without ranks that are lost."""

    def __init__(self, execution: Execution, loaders: Loaders) -> None:
        self._execution, self._loaders = execution, loaders
        self._before: dict[str, Tensor] = {}  # buffers, before the step that goes on

    def begin_step(self) -> None:
        """What a step changes before it is complete is kept, where the run is elastic."""
        model, execution = self._execution.model, self._execution
        if execution.world.member is not None:
            fed = {*model.statistics, *execution.active.step.fed}
            fed |= {name for name in model.buffers if name.endswith("num_batches_tracked")}
            self._before = {n: x.clone() for n, x in model.buffers.items() if n in fed}

    def end_step(self) -> None:
        """The step is complete."""
        self._before.clear()
        self._loaders.commit()

    def recover(
        self, error: Exception, steps: int, scheduler: Scheduler | None, adaptation: Adaptation
    ) -> Regrouped:
        """Behind `error` of a call that others did not end, in the step after `steps`. Raises it
        where no rank is lost or the run is not elastic, and RuntimeError where it cannot go on."""
        began, own = time.monotonic(), self._execution.world.member
        if own is None or not _of_a_loss(error, own):
            raise error
        if why := self._refused():
            raise RuntimeError(
                f"{message(error)}; the run ends, for {why}: go on with the newest checkpoint, "
                "--resume"
            ) from error
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)  # what they hold is of dead groups
        active, plan = self._execution.active, self._execution.plan
        lost: list[Loss] = []
        while True:
            number = own.number
            try:
                newest, first, again = self._meet(own, steps)
                self._regroup(active, plan, first)
                self._share(steps != newest, first, scheduler)
                adaptation.end()
                took, size = time.monotonic() - began, self._execution.world.size
                in_force, lost = str(self._execution.plan), [*lost, *own.lost]
                return Regrouped(newest, size, in_force, tuple(lost), took, again)
            except NoGeneration:
                raise
            except Exception as other:
                if own.number == number or not _of_a_loss(other, own):
                    raise  # no other loss is the cause
                lost += own.lost

    def _refused(self) -> str:
        """Why what is left is not what one device would have; empty where it is."""
        execution, plan = self._execution, self._execution.active.plan
        faults = {
            "the lost rank's rows of a carry are gone": execution.options.carry is not None,
            f"@synchronisation={plan.synchronisation} is not kept up without a rank so far":
                plan.sync.alone or bool(plan.sync.late or plan.sync.servers),
            f"@schedule={plan.schedule} has no flush": bool(plan.kept),
            "a GPU's collectives are not left so far": execution.world.backend != "gloo",
        }  # fmt: skip
        return next((why for why, found in faults.items() if found), "")

    def _meet(self, own: Member, steps: int) -> tuple[int, int, int]:
        """Meets the ranks that are left. The step behind which they go on, the first of those who
        hold it, and how many steps are made again."""
        execution, world, state = self._execution, self._execution.world, self._execution.state
        world.cut()
        execution.lose()
        for name, x in self._before.items():
            execution.model.buffers[name].copy_(x)
        world.leave()
        generation = own.next()
        world.enter(generation)
        execution.planning.survive(generation.before)
        table = world.everyone.all_gather_json([-1 if state.torn else steps, state.moves])
        if len({moves for _, moves in table}) > 1:
            raise RuntimeError(
                "another rank was lost while state moved, and ranks hold parts of two plans: go "
                "on with the newest checkpoint, --resume"
            )
        steps_of = [int(n) for n, _ in table]
        newest = self._newest(generation.before, steps_of)
        return newest, steps_of.index(newest), max(steps_of) - newest

    def _regroup(self, active: ActivePlan, plan: Plan, first: int) -> None:
        """The plan of before, as rank `first` had it, where it fits the ranks that there are."""
        own = self._execution.world.everyone.broadcast_json(str(plan), first)
        try:
            self._execution.regroup(active.step, Plan.parse(own))
        except ValueError:
            self._execution.regroup(active.step, Plan(LayoutSpec("data")))

    def _share(self, behind: bool, first: int, scheduler: Scheduler | None) -> None:
        """What is no tensor comes from the first rank that held the step. behind: this one did
        not."""
        known = None if scheduler is None else to_json(scheduler.state_dict(), "the scheduler")
        places = [place.to_dict() for place in self._loaders.committed]
        known, places = self._execution.world.everyone.broadcast_json([known, places], first)
        if scheduler is not None and behind:
            learning_rate.resume(scheduler, from_json(known, "scheduler"))
        self._loaders.go_on(map(Cursor.from_dict, places))

    def _newest(self, before: Sequence[int], steps: Sequence[int]) -> int:
        """The last step that ranks hold whole, whose parts count from now on. steps: of each."""
        missing = ""
        for newest in sorted({*steps} - {-1}, reverse=True):
            holders = [rank for rank, held in enumerate(steps) if held == newest]
            missing = self._execution.state.survive(before, holders)
            if not missing:
                return newest
        raise RuntimeError(
            f"what a lost rank held of {missing} is on no other one: go on with the newest "
            "checkpoint, --resume"
        )


def _of_a_loss(error: Exception, own: Member) -> bool:
    """Whether a rank is lost and `error` what came of it; the launcher may know that later."""
    return own.told or (bool(LOST.search(message(error))) and own.hears_of_loss())
