"""A wish to stop: a signal to any rank ends the run on all of them at the same step boundary."""

import os
import signal
from types import FrameType
from typing import Any, Protocol

import torch


class Everyone(Protocol):
    """The group of all ranks, as far as it is needed here."""

    def all_reduce(self, x: torch.Tensor, op: Any, asynchronous: bool, counted: bool) -> Any: ...


class Stop:
    """SIGTERM or SIGINT asks for a checkpoint and an end; a second one ends this process at once.

    Every rank calls `ask` before a step and `answer` after it; the exchange of one number runs
    beside the step.
    """

    def __init__(self, everyone: Everyone, device: torch.device) -> None:
        self.everyone, self.device = everyone, device
        self.received = 0  # the signal's number
        self._numbers = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number

    def ask(self) -> None:
        self._numbers = torch.tensor([self.received], dtype=torch.int32, device=self.device)
        self._work = self.everyone.all_reduce(self._numbers, "max", True, False)

    def answer(self) -> int:
        """The signal that some rank had received before `ask`, 0 if none."""
        if self._work is not None:
            self._work.wait()
        return int(self._numbers)
