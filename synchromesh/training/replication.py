"""When an elastic run copies its state in memory, and how it goes on from there
(checkpoint/peer_copies.py)."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch.optim.lr_scheduler import LRScheduler

from synchromesh.checkpoint import checkpoint
from synchromesh.checkpoint.json_state import to_json
from synchromesh.checkpoint.peer_copies import PeerCopies
from synchromesh.data.loaders import Loaders
from synchromesh.trace.step import Step
from synchromesh.training.execution import Execution
from synchromesh.training.learning_rate import ScaledRate
from synchromesh.training.trainer_state import TrainerState
from synchromesh.values.plan import Plan
from synchromesh.values.size import readable


class Replication:
    """Behind every so many steps, as many as let copies take a share of the time, what ranks of
    one host alone have is copied; nothing where others have all of it.

    place   where the training loop is, as JSON, which its checkpoints have, too
    newest  finds its newest checkpoint, on all ranks; None: it writes none
    back    what is no tensor of the copies, or the checkpoint, that a recovery has taken
    disk    that checkpoint"""

    SHARE: ClassVar = 0.03  # of the steps' time that copies may take; a goal
    UNTIMED: ClassVar = 8  # steps between the first two copies, until both are timed; chosen

    def __init__(self, execution: Execution, loaders: Loaders) -> None:
        self._execution, self._loaders = execution, loaders
        self.copies = PeerCopies(execution.state, self._hosts)
        self.place: Callable[[], Any] = lambda: None
        self.newest: Callable[[], Path | None] | None = None
        self.back: Any = None
        self.disk: tuple[Path, TrainerState] | None = None
        self.timed: float | None = None  # when the step that goes on began
        self._due: float = math.inf  # steps until the next copy
        self._moves = -1  # of the state, when that was decided
        self._steps, self._seconds = 0, 0.0  # that were timed since the last one

    def _hosts(self) -> tuple[str, ...]:
        own = self._execution.world.member
        return () if own is None else own.hosts

    @property
    def every(self) -> str:
        """Steps between copies: a number, `auto` as said above, or `off`."""
        own = self._execution.world.member
        return "off" if own is None else own.replicate

    @property
    def _unit(self) -> str:
        """What may be lost: hosts, or ranks of the only one."""
        return "host" if len({*self._hosts()}) > 1 else "rank"

    @property
    def _on(self) -> bool:
        return self._execution.world.elastic and self.every != "off"

    @property
    def lacks(self) -> bool:
        """Whether nothing is copied of what a rank alone has."""
        return self.every == "off" and not self._execution.state.alike

    def begin(self) -> None:
        """Ranks have met."""
        self._moves, self._steps, self._seconds = -1, 0, 0.0

    def forget(self) -> None:
        """The run has gone back behind what copies are of."""
        self.copies.drop()
        self.begin()

    def end_step(self) -> None:
        if self.timed is not None:
            self._seconds += time.monotonic() - self.timed
            self.timed = None
        self._steps += 1
        self._due -= 1

    def told(self, scheduler: LRScheduler | ScaledRate | None) -> list[Any]:
        """What is no tensor of a step: scheduler and places in the data."""
        known = None if scheduler is None else to_json(scheduler.state_dict(), "the scheduler")
        return [known, [place.to_dict() for place in self._loaders.committed]]

    def step(self, steps: int, scheduler: LRScheduler | ScaledRate | None) -> None:
        """Behind a step; copies where it is time. All ranks call alike."""
        if not self._on or self._execution.workers.asynchronous:  # each is behind another step
            return
        state = self._execution.state
        if begins := self._moves != state.moves:  # another plan is in force
            possible = self.copies.needed() and self._fits()
            self._moves, self._due = state.moves, 0 if possible else math.inf
        if self._due > 0:
            return
        began = time.monotonic()
        self.copies.take(steps, [*self.told(scheduler), self.place()])
        seconds = time.monotonic() - began
        self._due = self._next(seconds)
        self._steps, self._seconds = 0, 0.0
        if begins:
            whole, kept = self.copies.sizes()
            self._execution.options.say(
                f"copies of what one {self._unit} alone has take {seconds:.2f} s; two of them are "
                f"{readable(2 * whole)} of this rank's memory, {readable(2 * kept)} are others'"
            )

    def _fits(self) -> bool:
        """Whether all ranks have memory for copies, which is told where they have not."""
        lack = None if self.every != "auto" else self._lack(2)
        if lack is not None:
            self._execution.notices.once(
                f"what one {self._unit} alone has is not copied to another: {lack}, so that the "
                "run goes on from its newest checkpoint where that is lost; --replicate K copies "
                "all the same"
            )
        return lack is None

    def _lack(self, copies: int) -> str | None:
        """Which rank has no memory for so many. All ranks call alike."""
        memory, everyone = self._execution.planning.memory, self._execution.world.everyone
        size = copies * self.copies.sizes()[0]
        for rank, (needs, room) in enumerate(everyone.all_gather_json([size, memory.room()])):
            if needs > room:
                has = readable(max(0, int(room)))
                return f"rank {rank} would need {readable(int(needs))} for it and has {has} left"
        return None

    def _next(self, seconds: float) -> int:
        """Steps until the next copy, by what ranks have timed."""
        if self.every != "auto":
            return int(self.every)
        own = seconds, self._seconds / self._steps if self._steps else 0.0
        table = self._execution.world.everyone.all_gather_json(own)
        longest, step = max(float(c) for c, _ in table), min(float(s) for _, s in table)
        return math.ceil(longest / (self.SHARE * step)) if step else self.UNTIMED

    def keep(
        self, steps: int, scheduler: LRScheduler | ScaledRate | None, alone: bool = False
    ) -> None:
        """Before state moves: ranks can go back to what they have now. alone: each to its own."""
        if self._on and self._lack(1) is None:
            self.copies.take(steps, [*self.told(scheduler), self.place()], alone)
            self._moves = -1

    def moved(self) -> None:
        """All ranks have what they are to have."""
        if self._on and (self._execution.workers.asynchronous or not self.copies.needed()):
            self.copies.drop()

    @contextmanager
    def kept(self, steps: int, scheduler: LRScheduler | ScaledRate | None) -> Iterator[None]:
        """Inside, ranks can go back to what they had; all have moved at its end."""
        self.keep(steps, scheduler)
        try:
            yield
        except ValueError:  # nothing has moved
            self.moved()
            raise
        self.moved()

    def restore(self, step: Step) -> int:
        """The step of the newest copies, which ranks take back; -1: there are none that are whole.
        All ranks call alike."""
        execution = self._execution

        def held(plan: str, devices: int) -> Any:
            parsed, traces = Plan.parse(plan), execution.traces
            cuts = parsed.cuts(execution.model.paths())
            found = step if cuts == traces.cuts else traces.by_itself(cuts)
            return execution.check.held(parsed, found, devices)

        newest, told = self.copies.restore(held) if self.every != "off" else (-1, None)
        if newest >= 0:
            self.back = told
        return newest

    def restore_from_disk(self, holders: Sequence[int]) -> int:
        """The same of the newest checkpoint, which is read once there is room for it (`read`).
        holders: ranks that have trained."""
        path = None if self.newest is None else self.newest()
        if path is None or self._execution.state.forget(holders):
            return -1
        saved = TrainerState.from_dict(checkpoint.read_extra(path, self._execution.world), path)
        if "place" not in saved.extra:  # it was saved by the caller
            return -1
        self.copies.drop()
        known = None if saved.scheduler is None else to_json(saved.scheduler, "the scheduler")
        self.back = [known, [place.to_dict() for place in saved.cursors], saved.extra["place"]]
        self.disk = path, saved
        return saved.steps

    def read(self) -> None:
        """All ranks have room for what their checkpoint has, if they go on from one."""
        if self.disk is not None:
            self._execution.workers.forget_gradients()
            self._execution.load(*self.disk)
            self._execution.state.torn = False

    @property
    def state_from(self) -> str:
        """As of `Regrouped`."""
        if self.disk is not None:
            return "disk"
        return "survivors" if self.back is None else "peers"
