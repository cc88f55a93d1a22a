"""What looks at the steps of a turn that is not timed: recorded steps, and peak memory."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.recorder import Recorder
from synchromesh.values.fields import to_plain

LOOPBACK = "lo"


class Recorded:
    """The spans of all steps of a turn but the first, which brings the ranks together after the
    profiler has started; and the bytes that this rank sent in them.

    sent: bytes so far; None where it is not known."""

    def __init__(self, device: torch.device, sent: Callable[[], int | None]) -> None:
        self._device, self._sent = device, sent
        self._recorder: Recorder | None = None
        self._step: AbstractContextManager[None] | None = None
        self._sizes: list[int | None] = []  # bytes of each recorded step
        self._before: int | None = None

    def begin(self) -> None:
        """Before the turn's first step."""
        self._recorder, self._sizes = Recorder(self._device), []
        self._recorder.__enter__()

    def after_step(self, left: int, full: bool) -> None:
        """After each step. left: steps of the turn that are still to come. full: whether its batch
        had all rows; one that had not is left out."""
        assert self._recorder is not None
        sent = self._sent()
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
            if full:
                self._sizes.append(
                    None if sent is None or self._before is None else sent - self._before
                )
            else:
                self._recorder.steps.pop()
        if left:
            self._before = sent
            self._step = self._recorder.step()
            self._step.__enter__()

    def end(self) -> dict[str, Any]:
        """After its last step."""
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)
        found: dict[str, Any] = {"recording": recorder.recording.to_dict()}
        sizes = [size for size in self._sizes if size is not None]
        if sizes and len(sizes) == len(self._sizes):
            found["sent"] = sum(sizes) // len(sizes)
        return found


class Remembered:
    """Peak memory by kind, of the step of a turn. of: a tracker, made when the turn begins."""

    def __init__(self, of: Callable[[], MemoryTracker]) -> None:
        self._of = of
        self._memory: MemoryTracker | None = None

    def begin(self) -> None:
        self._memory = self._of()
        self._memory.__enter__()

    def after_step(self, left: int, full: bool) -> None:
        """After each step."""

    def end(self) -> dict[str, Any]:
        assert self._memory is not None
        memory, self._memory = self._memory, None
        memory.__exit__(None, None, None)
        return {"memory": to_plain(memory.by_kind)}


def interface_bytes(ranks: int) -> int | None:
    """Bytes that this rank has sent by the network interface's own count, headers and all: those
    of a host of its own (as in a lab), else its even share of what the loopback has carried. None
    where the system does not tell."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    try:
        count = int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())
    except (OSError, ValueError):
        return None
    return count // ranks if name == LOOPBACK else count
