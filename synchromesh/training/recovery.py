"""From ranks that are lost, or come, to the next step: those that are there meet anew, agree on a
state and go on.

Every rank holds what it had when its last step was complete; one that was interrupted has changed
buffers alone, which are put back. The newest step that ranks hold whole together is the one: who
is at another, or comes, counts as having nothing, and gets its parts by the moves of a switch of
plans. Where none is whole any more, that of their newest copies is (training/replication.py). One
that comes has traced and built by itself, in a world of its own."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from synchromesh.checkpoint.json_state import from_json
from synchromesh.data.cursor import Cursor
from synchromesh.data.loaders import Loaders
from synchromesh.engine.asynchronous import Seen, SeenSteps
from synchromesh.engine.control_channel import STEP, checked_gather
from synchromesh.engine.world import World
from synchromesh.launcher.generation import Generation, Loss, Regrouped
from synchromesh.launcher.member import Member, NoGeneration
from synchromesh.trace.step import Step
from synchromesh.training import learning_rate
from synchromesh.training.active_plan import unkept
from synchromesh.training.adaptation import Adaptation
from synchromesh.training.execution import Execution
from synchromesh.training.integrity import Integrity
from synchromesh.training.next_plan import NextPlan
from synchromesh.training.replication import Replication
from synchromesh.values.fault import message
from synchromesh.values.plan import Plan

Scheduler = LRScheduler | learning_rate.ScaledRate

NO_WAY = ": go on with the newest checkpoint, --resume"
HOLD_NOT = "the ranks that are left do not hold {} whole at any step (they are behind steps {})"


class Comes(Exception):
    """This rank has built all it needs, and comes to a run that goes on."""


class Survival:
    """How a trainer goes on with other ranks: some are lost, or come."""

    def __init__(self, execution: Execution, loaders: Loaders, adaptation: Adaptation) -> None:
        self._execution, self.loaders, self._adaptation = execution, loaders, adaptation
        self._comes = execution.world.alone  # holds nothing that counts
        self._before: dict[str, Tensor] = {}  # buffers, before the step that goes on
        self._summed = False  # whether this rank could complete the step that goes on
        self._next = NextPlan(execution, adaptation)
        self._step: Step  # the trace with which a recovery goes on, and where it is cut
        self._cuts: tuple[str, ...] = ()  # as `Traces.cuts`
        self._seen = Seen(0, -1, ())  # before it
        self._left_out = 0
        self._latest = 0  # step that one of the ranks has done
        self._lacks = ""  # as `_lacking`
        self._marks: dict[str, str] = {}  # of what this rank could take part in
        self.replication, self.integrity = Replication(execution, loaders), Integrity(execution)

    @classmethod
    def first_plan(cls, plan: Plan, world: World) -> Plan:
        """With which a rank begins: one that comes hears of the others' plan later."""
        return NextPlan.FALL_BACKS[0] if world.alone else plan

    def offer(self, marks: Mapping[str, str], steps: int) -> None:
        """This rank could take part in a run of ranks with the same marks from now on."""
        if (own := self._execution.world.member) is not None:
            if self._adaptation.adapter is None and not self._comes:
                self._adaptation.prepare()  # before anybody can come
            self._marks = dict(marks)
            self._execution.traces.note(self._execution.latest.step)
            if self._comes and own.cuts != self._execution.latest.step.cuts:
                self._execution.traces.by_itself(own.cuts)  # so that they need not wait for it
            self._offer(own)
            own.settled, own.steps = own.number, steps
            self.replication.begin()

    def _offer(self, own: Member) -> None:
        """Anew before each step: nobody can come under some plans, or where batches change."""
        world = self._execution.world
        own.cuts = () if world.rank else self._execution.latest.step.cuts
        changed = self._execution.traces.changed  # of which one that comes knows nothing
        free = world.alone or not (self._lacking or self._ending or changed)
        own.offer(self._marks if free else {})

    @property
    def own_loop(self) -> bool:
        """Whether the run is elastic, and the loop is not `fit`'s (training/own_loop.py)."""
        return self._execution.world.member is not None and not self._marks

    def ends(self, error: Exception) -> bool:
        """Whether `error` of a call in an own loop is of a loss."""
        own = self._execution.world.member
        return own is not None and self.own_loop and own.of_a_loss(error)

    def close(self) -> None:
        """Nobody can come any more."""
        if (own := self._execution.world.member) is not None:
            own.over = True

    def begin_step(self) -> None:
        """What a step changes before it is complete is kept, where the run is elastic."""
        if (own := self._execution.world.member) is not None:
            if self.own_loop:
                self.require_there()
                own.settled = own.number
            self._offer(own)
            if own.told:  # one that waits for nobody is not interrupted otherwise
                raise RuntimeError("other ranks are lost, or come")
            self.replication.timed = time.monotonic()
            buffers = self._execution.model.buffers.items()
            self._before = {n: x.detach().clone() for n, x in buffers if not x.is_meta}

    def require_there(self) -> None:
        """ValueError for a rank that would come to a loop of a script's own."""
        if self._comes:
            raise ValueError(
                "ranks come to runs of `fit` alone: where those of this script are in its loop "
                "cannot be told to others"
            )

    def agree(self, steps: int) -> None:
        """All ranks can complete the step behind `steps`: where they hold parts of tensors, none
        does before. A rank that is told so late completes it when it learns that another one has
        (`_meet`)."""
        self.integrity.gradients(steps)
        execution = self._execution
        self._summed = not execution.workers.asynchronous
        if execution.world.member is not None and self._summed and not execution.state.alike:
            checked_gather(execution.world.everyone, STEP)

    def end_step(self) -> None:
        """The step is complete."""
        self._summed = False
        self._before.clear()
        if (own := self._execution.world.member) is not None:
            self.loaders.commit()
            self.replication.end_step()
            own.steps += 1

    def recover(
        self, error: Exception, trainer: "Recovering", complete: Callable[[], None]
    ) -> Regrouped:
        """Behind `error` of a call that others did not end. Raises it where no rank is lost or the
        run is not elastic, and RuntimeError where it cannot go on. complete: what makes a step
        complete whose gradients are summed."""
        began, own = time.monotonic(), self._execution.world.member
        if own is None or not (isinstance(error, Comes) or own.of_a_loss(error)):
            raise error
        if (why := self._ending) and not isinstance(error, Comes):
            own.refuse(why)
            raise RuntimeError(f"{message(error)}; the run ends: {why}") from error
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)  # what they hold is of dead groups
        active = self._execution.latest
        self._next.begin()
        self._step = active.step
        self._cuts = active.plan.cuts(self._execution.model.paths())
        self._seen = self._execution.workers.leave(trainer.steps)
        self._lacks, self._latest, lost, came = self._lacking, 0, list[Loss](), 0
        self.replication.back = self.replication.disk = None
        while True:
            number = own.number
            try:
                self._go_on(own, trainer, complete)
                came += own.came
                took, size = time.monotonic() - began, self._execution.world.size
                in_force, lost = str(self._execution.plan), [*lost, *own.lost]
                own.settled, own.steps, self._comes = own.number, trainer.steps, False
                return Regrouped(
                    trainer.steps, len({*own.hosts}), size, in_force, tuple(lost), came,
                    size - own.stay, took, self._latest - trainer.steps,
                    self.replication.state_from, self._left_out, self._next.why,
                )  # fmt: skip
            except NoGeneration:
                raise
            except Exception as other:
                if own.number == number or not own.of_a_loss(other):
                    raise  # no other loss is the cause
                lost += own.lost
                came += own.came

    def _go_on(self, own: Member, trainer: "Recovering", complete: Callable[[], None]) -> None:
        """With the ranks that are left, and those that come."""
        state, moves = self._execution.state, self._execution.state.moves
        newest, first = self._meet(own, trainer, complete)
        shared = self._shared(trainer.scheduler, self._next.told(own.stay), first)
        if shared["moves"]:  # so that there is a way back
            self.replication.keep(newest, trainer.scheduler, alone=True)
        try:
            self._trace(*shared["cuts"])
            self._next.shift(self._step, shared, own.stay)
            self._execution.world.everyone.all_gather_json(0)  # all have moved
            self.replication.moved()
            self._adopt(shared, trainer.scheduler)
            self.replication.read()
        finally:
            if state.moves != moves:  # what this rank holds is of that step
                trainer.steps = newest
        self._adaptation.end()
        if self.replication.disk is not None:
            self._adaptation.resume()
            self.integrity.restored(trainer.steps)
        self.replication.begin()

    @property
    def _lacking(self) -> str:
        """What ranks that are left lack, so that all go on with a checkpoint, and nobody comes."""
        batches = self._adaptation.batches
        changing = not (batches is None or batches.of_ranks)
        lacks = unkept(self._execution.latest.plan, self._execution.options, changing)
        return self.integrity.spoiled or lacks

    @property
    def from_disk(self) -> bool:
        """Whether the run may go on with a checkpoint soon, so that it begins with one."""
        if self._execution.world.member is None or self.integrity.rolls_back:
            return self.integrity.rolls_back
        alone = self._execution.workers.asynchronous or self.replication.lacks
        return bool(self._lacking or alone or self.integrity.every)

    @property
    def _ending(self) -> str:
        """Why a loss ends the run; empty where it does not."""
        execution, lacks = self._execution, self._lacking
        plan, step = execution.latest.plan, execution.latest.step
        attributes = step.opaque and bool({*step.changed} - execution.model.buffers.keys())
        faults = {
            lacks: bool(lacks) and self.replication.newest is None,
            f"workers of a loop of a script's own are at different steps ({plan.synchronisation})":
                self.own_loop and plan.sync.asynchronous,
            "an untraced forward has changed attributes": attributes,
            "a GPU's collectives are not left so far": execution.world.backend != "gloo",
        }  # fmt: skip
        why = next((why for why, found in faults.items() if found), "")
        return f"{why}{NO_WAY}" if why else ""

    def _meet(
        self, own: Member, trainer: "Recovering", complete: Callable[[], None]
    ) -> tuple[int, int]:
        """Meets the ranks that are left. The step behind which they go on, and the first of those
        who hold it."""
        execution, world, state = self._execution, self._execution.world, self._execution.state
        execution.traces.cuts = self._cuts  # also where a switch was interrupted
        world.cut()
        execution.lose()
        world.leave()
        generation = own.next()
        if not self._comes:
            state.renumber(generation.before)
            self._next.renumber(generation)
            self.replication.copies.renumber(generation.before)
        world.enter(generation)
        execution.planning.regroup()
        self._introduce()
        progress = self._complete(trainer, complete)
        self._put_back()
        here = -1 if state.torn or self._comes else trainer.steps
        table = world.everyone.all_gather_json([here, state.moves, self._lacks])
        steps_of = [int(n) for n, *_ in table]
        self._lacks = next(
            (lacks for *_, lacks in table if lacks), ""
        )  # one that comes knows none
        first = max(range(len(steps_of)), key=steps_of.__getitem__)
        if progress.apart:  # servers have all that counts
            steps_of = [progress.newest if steps >= 0 else steps for steps in steps_of]
        self._left_out = progress.left_out
        self._latest = max(self._latest, *steps_of)
        if self._lacks:
            missing = self._lacks
        elif len({moves for _, moves, _ in table}) > 1:  # another one was lost while it moved
            missing = HOLD_NOT.format("the state under one plan", steps_of)
        else:
            newest, missing = self._newest(steps_of)
            if not missing:
                self.replication.disk = None  # of an earlier attempt
                return newest, first if progress.apart else steps_of.index(newest)
        state.moves = max(int(moves) for _, moves, _ in table)
        trained = [rank for rank, was in enumerate(generation.before) if was != Generation.NEW]
        return self._restore(trained, missing), trained[0]

    def _restore(self, trained: Sequence[int], missing: str) -> int:
        """The step of copies, or of a checkpoint, with which ranks go on. trained: ranks."""
        newest = -1 if self._lacks else self.replication.restore(self._step)
        if newest < 0:
            newest = self.replication.restore_from_disk(trained)
        if newest < 0:
            none = "" if self.replication.newest is None else ", nor has the run a checkpoint"
            raise RuntimeError(f"{missing}{none or NO_WAY}")
        return newest

    def _complete(self, trainer: "Recovering", complete: Callable[[], None]) -> SeenSteps:
        """What ranks have done; a step that this one can complete, and another has, or a server
        has the gradient of, is complete then."""
        own = self._seen._replace(steps=trainer.steps)
        progress = SeenSteps(
            [Seen(*x) for x in self._execution.world.everyone.all_gather_json(own)]
        )
        done = progress.newest if self._summed else max([0, *progress.seen(own.worker)])
        if done > trainer.steps and not self._lacks:
            complete()
        return progress

    def _put_back(self) -> None:
        """Buffers are as before the step that did not end."""
        for name, x in self._before.items():
            self._execution.model.buffers[name].copy_(x)
        self._before.clear()
        self._summed = False

    def _introduce(self) -> None:
        """Those that come learn what the others hold."""
        execution, state = self._execution, self._execution.state
        everyone = execution.world.everyone
        comes = everyone.all_gather_json(self._comes)
        if True not in comes:
            return
        if all(comes):
            raise RuntimeError("all ranks that trained are lost: go on with --resume")
        first = comes.index(False)
        told = [*state.placed_by, state.ranks, state.moves, execution.planning.rows]
        told += [execution.traces.changed, self._step.cuts, self._cuts]
        text, devices, ranks, moves, rows, changed, *cuts = everyone.broadcast_json(told, first)
        if changed and (own := execution.world.member) is not None:
            if self._comes:
                own.give_up("comes to a model that has changed since the run began")
            own.hears_of_loss("")
            raise RuntimeError("the ranks that come are lost")
        execution.traces.forget_shapes()
        if self._comes:
            execution.planning.rows = rows
            self._trace(*cuts)
            state.come(execution.check.held(Plan.parse(text), self._step, devices), ranks, moves)

    def _trace(self, at: Sequence[str], cuts: Sequence[str]) -> None:
        """The trace to go on with, which others may have, is cut `at` these, and stands for a plan
        of `cuts`."""
        if self._step.cuts != tuple(at):
            self._step = self._execution.traces.by_itself(at)
        self._cuts = self._execution.traces.cuts = tuple(cuts)

    def _newest(self, steps: Sequence[int]) -> tuple[int, str]:
        """The last step that ranks hold whole, whose parts count from now on; what is missing,
        where there is none. steps: of each."""
        missing = "the state"
        for newest in sorted({*steps} - {-1}, reverse=True):
            holders = [rank for rank, held in enumerate(steps) if held == newest]
            missing = self._execution.state.count(holders)
            if not missing:
                self._execution.state.mend()
                return newest, ""
        return -1, HOLD_NOT.format(missing, list(steps))

    def _shared(self, scheduler: Scheduler | None, told: dict[str, Any], first: int) -> Any:
        """What is no tensor, of the first rank that holds the step: what `told` says of plans, its
        scheduler and places, or those of the copies that were taken; moves: whether ranks that
        hold something may lose parts of it by that plan."""
        back, everyone, own = self.replication.back, self._execution.world.everyone, None
        if everyone.index == first:
            moves = (
                told["plan"] != str(self._execution.latest.plan) or not self._execution.state.alike
            )
            known, places, *_ = back or self.replication.told(scheduler)
            own = {**told, "scheduler": known, "places": places}
            own["moves"] = moves and back is None
            own["cuts"] = self._step.cuts, self._cuts
            own["groups"] = self._execution.state.optimizer_state.describe()["groups"]
        return everyone.broadcast_json(own, first)

    def _adopt(self, shared: Any, scheduler: Scheduler | None) -> None:
        self._execution.state.optimizer_state.adopt_groups(shared["groups"])
        if scheduler is not None:
            learning_rate.resume(scheduler, from_json(shared["scheduler"], "scheduler"))
        if not self.own_loop:
            self.loaders.go_on(map(Cursor.from_dict, shared["places"]))


class Recovering(Protocol):
    """What a recovery changes of a trainer."""

    steps: int
    scheduler: Scheduler | None
