"""Requests to stop a run: signals, and what its caller asks."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

from synchromesh.training.trainer import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT)
REQUEST = "request"  # to stop, by the caller, where no signal is the cause


class Stop:
    """Requests to stop: asked of any rank, one ends the run on all at the same step boundary.
    Every rank calls `ask` before a step and `answer` after it. requested: is asked before each."""

    REPEATED_SECONDS: ClassVar = 1.0  # signals that come sooner after each other are one; chosen

    def __init__(self, trainer: Trainer, requested: Callable[[], bool] | None = None) -> None:
        self.trainer = trainer
        self.received = 0  # the signal's number
        self._received_at = 0.0
        self._requested = requested or (lambda: False)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT ask for a stop and a second one ends this process at once;
        but in another thread than the main one, where Python has no signal handlers. Whoever
        signals all processes of a job, and a launcher that passes it on, are one request."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() > self._received_at + self.REPEATED_SECONDS:
            os._exit(128 + number)

    def ask(self) -> None:
        self.trainer.stop_request = 2 * self.received + int(self._requested())

    def answer(self, together: bool = True) -> str:
        """A signal's name that some rank had received before `ask`, or REQUEST; empty: go on.
        together: all workers are at this step; those that go on without each other stop there."""
        trainer, agreed = self.trainer, self.trainer.agreed_stop_request
        if trainer.plan.sync.asynchronous:  # a step is one worker's
            if not together:
                return ""
            agreed = max(trainer.gather_numbers(trainer.stop_request))
        number, requested = divmod(agreed, 2)
        return signal.Signals(number).name if number else REQUEST if requested else ""
