"""A rank's meter: what its steps take, in the turns that the study grants it."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from synchromesh.runs.utilisation import Utilisation
from synchromesh.study.channel import Channel
from synchromesh.study.turns import Turn

ENDLESS = 10**9
SHORT = 2  # batches of a watched turn that may be short, as the last one of an epoch: it is longer


class Watch(Protocol):
    """What looks at the steps of one turn, which are not timed."""

    def begin(self) -> None: ...

    def after_step(self, left: int, full: bool) -> None: ...

    def end(self) -> dict[str, Any]: ...


class Meter:
    """Counts the steps of a turn, and waits for the next one between two steps.

    batch     rows of a full global batch
    over      the study has ended the run
    device    of this rank, once it is known
    settled   asked after each turn: whether nothing is tried any more
    seconds   of training so far: steps, and waiting for their data; a step that is watched counts
              as the last one that was not"""

    def __init__(self, channel: Channel, batch: int) -> None:
        self.channel, self.batch, self.over, self.seconds = channel, batch, False, 0.0
        self.settled: Callable[[], bool] = lambda: True
        self.watches: Mapping[str, Watch] = {}  # by the mode of their turns
        self._turn = Turn("warm-up", 0)
        self._left = self._short = 0
        self._steps: list[tuple[float, float, int]] = []  # seconds, waited, rows
        self._granted = self._usual = 0.0
        self.device = torch.device("cpu")
        self._used = Utilisation(self.device)

    def begin(self) -> None:
        """Before the first step."""
        self._next()

    def step(self, seconds: float, waited: float, rows: int) -> None:
        """After each step, also of one that ran on after the last turn. rows: of the global
        batch."""
        if self.over:
            return
        watched = self._turn.mode in self.watches
        self._usual = self._usual if watched else seconds
        self.seconds += waited + (self._usual if watched else seconds)
        self._steps.append((seconds, waited, rows))
        self._left -= 1
        if watched:
            full = rows == self.batch or self._short == SHORT
            self._short += not full
            self._left += not full
            self.watches[self._turn.mode].after_step(self._left, full)
        if not self._left:
            self._end_turn()
            self._next()

    def epoch(
        self, epoch: int, step: int, loss: float | None, values: Mapping[str, float]
    ) -> None:
        """After an epoch and its validation."""
        self.channel.say(
            "epoch", epoch=epoch, step=step, seconds=self.seconds, loss=loss, values=dict(values)
        )

    def finish(self, **values: Any) -> None:
        """After the last step."""
        if self._steps and self._turn.mode not in self.watches:
            self._end_turn()
        self.channel.say("ended", **values)

    def _next(self) -> None:
        turn = None if self.over else self.channel.turn()
        if turn is None:
            self.over, self._left = True, ENDLESS
            return
        self._turn, self._left, self._short = turn, turn.steps, 0
        if turn.mode in self.watches:
            self.watches[turn.mode].begin()
        self._used = Utilisation(self.device)
        self._used.__enter__()
        self._granted = time.perf_counter()

    def _end_turn(self) -> None:
        self._used.__exit__()
        wall = time.perf_counter() - self._granted
        seen: dict[str, Any] = {}
        if self._turn.mode in self.watches:
            seen = self.watches[self._turn.mode].end()
        self.channel.say(
            "turn",
            mode=self._turn.mode,
            steps=self._steps,
            used=self._used.share,
            wall=wall,
            settled=self.settled(),
            seen=seen,
        )
        self._steps = []
