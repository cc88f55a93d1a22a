"""A rank's meter: what its steps take, in the turns that the study grants it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from synchromesh.runs.events import EpochMeasured, RankPrepared, RunEnded, RunEvent, TurnEnded
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.utilisation import Utilisation
from synchromesh.runs.watches import RecordedSteps, RememberedStep, TurnWatch
from synchromesh.study.channel import Channel
from synchromesh.study.turns import Turn


class Meter:
    """Counts the steps of a turn, and waits for the next one between two steps.

    batch     rows of a full global batch
    say       tells the study an event
    over      the study has ended the run
    device    of this rank, once it is known
    settled   asked after each turn: whether nothing is tried any more
    seconds   of training so far: steps, and waiting for their data; a step that is watched counts
              as the last one that was not"""

    ENDLESS: ClassVar[int] = 10**9  # steps of a run that only its study ends
    # batches of a watched turn that may be short, as the last one of an epoch: it is longer
    MOST_SHORT: ClassVar[int] = 2

    def __init__(self, channel: Channel, batch: int) -> None:
        self.channel, self.batch, self.over, self.seconds = channel, batch, False, 0.0
        self.say: Callable[[RunEvent], None] = channel.say
        self.settled: Callable[[], bool] = lambda: True
        self.watches: Mapping[str, TurnWatch] = {}  # by the mode of their turns
        self.device = torch.device("cpu")
        self._turn = Turn("warm-up", 0)
        self._left = self._short = 0
        self._done = 0  # steps before this turn
        self._steps: list[tuple[float, float, int]] = []  # seconds, loading, rows
        self._granted = self._usual = self._epoch_began = 0.0
        self._used: Utilisation | None = None  # of this turn

    def prepare(
        self, device: torch.device, sent: Callable[[], int | None],
        tracker: Callable[[], MemoryTracker],
    ) -> None:  # fmt: skip
        """This rank is ready for its first turn. sent: bytes so far. tracker: of its memory."""
        self.device = device
        self.watches = {"recorded": RecordedSteps(device, sent), "memory": RememberedStep(tracker)}
        self.say(RankPrepared(device=device.type))

    def step(self, seconds: float, loading: float, rows: int) -> None:
        """After each step, also of one that ran on after the last turn. rows: of all ranks."""
        if self.over:
            return
        watch = self._watch()
        self._usual = seconds if watch is None else self._usual
        self.seconds += loading + self._usual
        self._steps.append((seconds, loading, rows))
        self._left -= 1
        if watch is not None:
            full = rows == self.batch or self._short == self.MOST_SHORT
            self._short += not full
            self._left += not full
            watch.after_step(self._left, full)
        if not self._left:
            self._end_turn()
            self.begin()

    def epoch(self, epoch: int, step: int, loss: float | None, means: Mapping[str, float]) -> None:
        """After an epoch and its validation."""
        self.say(
            EpochMeasured(
                epoch=epoch, step=step, loss=loss, seconds=self.seconds - self._epoch_began,
                trained_seconds=self.seconds, metrics=dict(means),
            )
        )  # fmt: skip
        self._epoch_began = self.seconds

    def finish(self, plan: str | None, staleness: Mapping[str, Any] | None = None) -> None:
        if self._steps and self._watch() is None:
            self._end_turn()
        self.say(RunEnded.saying({"plan": plan, "staleness": staleness}))

    def _watch(self) -> TurnWatch | None:
        return self.watches.get(self._turn.mode)

    def begin(self) -> None:
        """Before the first step, and after each turn: waits for the next one."""
        turn = None if self.over else self.channel.turn()
        if turn is None:
            self.over, self._left = True, self.ENDLESS
            return
        self._turn, self._left, self._short = turn, turn.steps, 0
        if (watch := self._watch()) is not None:
            watch.begin()
        self._used = Utilisation(self.device)
        self._granted = time.perf_counter()

    def _end_turn(self) -> None:
        assert self._used is not None
        used, wall = self._used.end(), time.perf_counter() - self._granted
        if (watch := self._watch()) is not None:
            self.say(watch.end())
        seconds, loading, rows = zip(*self._steps, strict=True)
        self.say(
            TurnEnded(
                first=self._done + 1, seconds=seconds, loading=loading, rows=rows,
                mode=self._turn.mode, utilisation=used, wall=wall, settled=self.settled(),
            )
        )  # fmt: skip
        self._done += len(self._steps)
        self._steps = []
