"""Watches: what looks at a few steps, in `train` and in the turns of a study that are not timed:
recorded steps, and peak memory. Both slow down the step that they look at."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from synchromesh.runs import events
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.recorder import Recorder, gathered
from synchromesh.runs.run_folder import RunFolder
from synchromesh.runs.shares import mean, shares
from synchromesh.runs.spans import Recording
from synchromesh.runs.timeline import chrome_trace, write_chrome_trace
from synchromesh.runs.trainer_events import memory_tracker
from synchromesh.training.trainer import Trainer
from synchromesh.values.fields import to_plain

Seen = events.RunEvent
Write = Callable[[Callable[[], None]], None]
LOOPBACK = "lo"


class TurnWatch(Protocol):
    """What looks at the steps of one turn."""

    def begin(self) -> None:
        """Before the turn's first step."""

    def after_step(self, left: int, full: bool) -> None:
        """After each step. left: steps still to come. full: whether its batch had all rows."""

    def end(self) -> events.RunEvent:
        """After its last step."""


class RecordedSteps:
    """The spans of steps, and the bytes that this rank sends in them. In a turn, of all its steps
    but the first, which brings the ranks together after the profiler has started, and those of
    short batches. sent: bytes so far; None where it is not known."""

    def __init__(self, device: torch.device, sent: Callable[[], int | None]) -> None:
        self._device, self._sent = device, sent
        self._before: int | None = None
        self._began: float | None = None  # the step that goes on, if one does
        self._sizes: list[int | None] = []  # bytes of each recorded step

    def begin(self) -> None:
        """Before the first step: to start takes up to seconds, not the same on all ranks."""
        self._recorder, self._sizes, self._began = Recorder(self._device), [], None
        self._recorder.__enter__()

    def step_begins(self) -> None:
        """What goes on now is recorded."""
        self._before, self._began = self._sent(), time.perf_counter()

    def step_ended(self, seconds: float | None = None) -> None:
        """seconds: that it took, where not since `step_begins`."""
        assert self._began is not None
        before, sent = self._before, self._sent()
        self._sizes.append(None if sent is None or before is None else sent - before)
        began = self._began if seconds is None else time.perf_counter() - seconds
        self._recorder.step_ended(began)

    def after_step(self, left: int, full: bool) -> None:
        if self._began is not None and full:
            self.step_ended()
        if left:
            self.step_begins()

    def end(self) -> events.RankRecorded:
        self._recorder.__exit__(None, None, None)
        sizes = [size for size in self._sizes if size is not None]
        known = sizes and len(sizes) == len(self._sizes)
        sent = sum(sizes) // len(sizes) if known else None
        return events.RankRecorded(recording=self._recorder.recording, sent=sent)


class RememberedStep:
    """Peak memory by kind, of one step. of: a tracker, made when that begins."""

    def __init__(self, of: Callable[[], MemoryTracker]) -> None:
        self._of = of

    def begin(self) -> None:
        self._memory = self._of()
        self._memory.__enter__()

    def after_step(self, left: int, full: bool) -> None:
        pass

    def end(self) -> events.MemoryPeak:
        self._memory.__exit__(None, None, None)
        return events.MemoryPeak(peak=self._memory.by_kind)


class StepWatch:
    """Records steps `first` to `last` of a run; the step behind them shows its memory.

    All ranks call `ahead` before and `done` after each step, which has collectives where it looks
    at one. Such steps are special: no sample of what a step takes."""

    DEFAULT_STEP = 20  # of a call: the choice of pieces takes its first twelve

    def __init__(self, trainer: Trainer, first: int, last: int) -> None:
        self.trainer, self.first, self.last = trainer, first, last
        self.recorded = False  # whether all of them were
        ledger, device = trainer.world.ledger, trainer.world.device
        self._recording = RecordedSteps(device, lambda: ledger.sent)
        self._memory = RememberedStep(lambda: memory_tracker(trainer))
        self._looks: TurnWatch | None = None  # what has begun

    def special(self, step: int) -> bool:
        """Whether the watch looks at this step."""
        return self.first <= step <= self.last + 1

    def ahead(self, step: int) -> None:
        """Before step `step` of the run."""
        watches: dict[int, TurnWatch] = {self.first: self._recording, self.last + 1: self._memory}
        if step in watches and self._looks is None:
            self._looks = watches[step]
            self._looks.begin()
            if self._looks is self._recording:
                self.trainer.world.everyone.barrier()
        if self._looks is self._recording:
            self._recording.step_begins()

    def done(self, step: int, seconds: float, folder: RunFolder, write: Write) -> Seen | None:
        """After step `step`, which took `seconds`; what came of looking at it, when that is over.
        Rank 0 writes the trace into `folder`, by way of `write`, which bears a full disk."""
        if self._looks is self._recording:
            self._recording.step_ended(seconds)
            if step == self.last:
                self._looks, self.recorded = None, True
                return self._of_all(self._recording.end(), folder, write)
        elif self._looks is self._memory:
            self._looks, world = None, self.trainer.world
            peaks = world.everyone.all_gather_json(to_plain(self._memory.end().peak))
            by = "allocator" if world.device.type == "cuda" else "tracked tensors"
            return events.MemoryTracked.of({"step": step, "peak_bytes": peaks, "by": by})
        return None

    def close(self) -> None:
        """The run is over, maybe in the middle of what was to be seen."""
        if self._looks is not None:
            self._looks.end()
            self._looks = None

    def _of_all(self, own: events.RankRecorded, folder: RunFolder, write: Write) -> Seen:
        everyone, steps = self.trainer.world.everyone, (self.first, self.last)
        recordings = gathered(own.recording, everyone)
        document = chrome_trace(recordings, steps=steps, plan=str(self.trainer.plan))
        sent = everyone.all_gather_json(own.sent)
        if self.trainer.rank == 0:
            write(lambda: write_chrome_trace(folder.trace, document))
        left_out, trace = document["otherData"]["computations_left_out"], folder.trace.name
        return steps_recorded(recordings, sent, steps=steps, trace=trace, left_out=left_out)


IDLE = 0.01  # of the busiest rank's computation, below which a rank takes no part; chosen


def steps_recorded(
    recordings: Sequence[Recording], sent: Sequence[int | None], **more: Any
) -> events.StepsRecorded:
    """What all ranks recorded, on a common clock, and sent in a step; the mean is of those that
    the plan gives work. more: further fields."""
    by_rank = shares(recordings)
    busiest = max((s.computation for s in by_rank), default=0.0)
    working = [s for s in by_rank if s.computation >= IDLE * busiest]  # idle ranks wait all along
    return events.StepsRecorded(
        shares=tuple(map(to_plain, by_rank)), mean=to_plain(mean(working)),
        sent_bytes_per_step=() if None in sent else tuple(n for n in sent if n is not None),
        spans=sum(len(r.spans) for r in recordings), **more,
    )  # fmt: skip


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
