"""The watch: what `train` looks at in a few steps of a run, on every rank.

    ... step 19 | 20: spans are recorded | 21: memory by kind is tracked | step 22 ...

Both slow down the step that they look at, so that such steps are special: no sample of what a
step takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from synchromesh.runs.chrome import chrome_trace, write_chrome_trace
from synchromesh.runs.common_clock import gathered
from synchromesh.runs.memory import MemoryTracker
from synchromesh.runs.recorder import Recorder
from synchromesh.runs.run_folder import RunFolder
from synchromesh.runs.shares import mean, shares
from synchromesh.training.trainer import Trainer
from synchromesh.values.fields import to_plain

Write = Callable[[Callable[[], None]], None]
DEFAULT_STEP = 20  # of a call: the choice of interleaving takes its first twelve


@dataclass(frozen=True)
class Seen:
    """Something to log: the event and its fields."""

    event: str
    values: dict[str, Any]


class StepWatch:
    """Records steps `first` to `last` of a run; the step behind them shows its memory.

    All ranks call `ahead` before and `done` after each step, which has collectives where it looks
    at one."""

    def __init__(self, trainer: Trainer, first: int, last: int) -> None:
        self.trainer, self.first, self.last = trainer, first, last
        self.recorded = False  # whether all of them were
        self._recorder: Recorder | None = None
        self._memory: MemoryTracker | None = None
        self._sent = 0

    def special(self, step: int) -> bool:
        """Whether the watch looks at this step."""
        return self.first <= step <= self.last + 1

    def ahead(self, step: int) -> None:
        """Before step `step` of the run."""
        trainer = self.trainer
        if step == self.first:
            self._recorder = Recorder(trainer.world.device)
            self._recorder.__enter__()
            trainer.world.everyone.barrier()
            self._sent = trainer.world.ledger.sent
        elif step == self.last + 1:
            parameters, buffers = trainer.model.parameters, trainer.model.buffers
            self._memory = MemoryTracker(parameters.values(), buffers.values(), trainer.optimizer)
            self._memory.__enter__()

    def done(self, step: int, seconds: float, folder: RunFolder, write: Write) -> Seen | None:
        """After step `step`, which took `seconds`; what came of looking at it, when that is over.
        Rank 0 writes the trace into `folder`, by way of `write`, which bears a full disk."""
        if self._recorder is not None:
            self._recorder.stepped(seconds)
            if step == self.last:
                return self._recorded(self._end(), folder, write)
        elif self._memory is not None:
            return self._remembered(step)
        return None

    def close(self) -> None:
        """The run is over, maybe in the middle of what was to be seen."""
        if self._recorder is not None:
            self._end()
        if self._memory is not None:
            self._memory.__exit__(None, None, None)
            self._memory = None

    def _end(self) -> Recorder:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.__exit__(None, None, None)
        return recorder

    def _recorded(self, recorder: Recorder, folder: RunFolder, write: Write) -> Seen:
        everyone = self.trainer.world.everyone
        self.recorded = True
        count = self.last - self.first + 1
        sent = (self.trainer.world.ledger.sent - self._sent) // count
        recordings = gathered(recorder.recording, everyone)
        by_rank = shares(recordings)
        numbers = [self.first, self.last]
        document = chrome_trace(recordings, steps=numbers, plan=str(self.trainer.plan))
        values: dict[str, Any] = {
            "steps": numbers,
            "shares": [s.to_dict() for s in by_rank],
            "mean": mean(by_rank).to_dict(),
            "sent_bytes_per_step": everyone.all_gather_json(sent),
            "trace": folder.trace.name,
            "spans": sum(len(r.spans) for r in recordings),
            "left_out": document["otherData"]["computations_left_out"],
        }
        if self.trainer.rank == 0:
            write(lambda: write_chrome_trace(folder.trace, document))
        return Seen("recording", values)

    def _remembered(self, step: int) -> Seen:
        memory, self._memory = self._memory, None
        assert memory is not None
        memory.__exit__(None, None, None)
        peaks = self.trainer.world.everyone.all_gather_json(to_plain(memory.by_kind))
        by = "allocator" if memory.device.type == "cuda" else "tracked tensors"
        return Seen("memory", {"step": step, "peak_bytes": peaks, "by": by})
