"""A record: what the ranks of one contestant have said, and the run's results that follow."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from synchromesh.results.run import RunResult
from synchromesh.runs import events
from synchromesh.runs.result import E, TimedSteps, epochs, of_kind, run_result
from synchromesh.runs.spans import Recording
from synchromesh.runs.tensorboard import TensorBoard
from synchromesh.runs.timeline import chrome_trace, timeline
from synchromesh.runs.watches import steps_recorded
from synchromesh.study.cell import StudyCell
from synchromesh.study.target import Target


@dataclass
class RunRecord:
    """What ranks said, by rank and in order. processors: cores that each may use."""

    cell: StudyCell
    processors: Sequence[float]
    emulated: bool = False
    said: dict[int, list[events.RunEvent]] = field(default_factory=lambda: defaultdict(list))

    def add(self, rank: int, event: events.RunEvent) -> None:
        self.said[rank].append(event)

    def of(self, kind: type[E], rank: int = 0) -> list[E]:
        return of_kind(kind, self.said[rank])

    def last(self, kind: type[E]) -> list[E]:
        """The last of a kind of each rank that has said one."""
        return [event for rank in range(self.cell.devices) for event in self.of(kind, rank)[-1:]]

    def settled(self) -> bool:
        """Whether no rank tries any more what is quicker."""
        last = self.last(events.TurnEnded)
        return len(last) == self.cell.devices and all(turn.settled for turn in last)

    def step_seconds(self) -> float | None:
        """The quickest of the last turn, which held no switch, on the slowest rank."""
        return max((min(_seconds(turn)) for turn in self.last(events.TurnEnded)), default=None)

    def steps(self, mode: str) -> int:
        return sum(len(turn.rows) for turn in self.of(events.TurnEnded) if turn.mode == mode)

    def spent(self) -> tuple[float, int]:
        """Seconds of rank 0's turns so far, with what validation they held; and their steps."""
        turns = self.of(events.TurnEnded)
        return sum(turn.wall for turn in turns), sum(len(turn.rows) for turn in turns)

    @property
    def cuda(self) -> bool:
        return any(event.device == "cuda" for event in self.of(events.RankPrepared))

    def failed(self, why: str) -> RunResult:
        return self.cell.failed(why, self.emulated)

    def result(
        self, targets: Sequence[Target], steps_of_epoch: int | None, asked_steps: int | None = None
    ) -> RunResult:
        """What was measured. steps_of_epoch: None where it is not known. asked_steps: of a study
        by steps, whose seconds are those of so many, however many were timed. ValueError where the
        loss or a metric is no finite number."""
        _require_finite(self.of(events.EpochMeasured))
        metrics, timed, recordings = epochs(self.said[0]), self._timed(), self.recordings()
        done = replace(
            self.failed(""), status="done", plan=self.of(events.RunEnded)[0].plan,
            # one picture of each strategy is enough
            timeline=timeline(recordings) if recordings and self.cell.seed == 0 else (),
            **self._utilisation() if timed.wall else {},
            reason="" if timed.seconds else
            f"no step of full size was timed: the run had {self.spent()[1]} in all, of which the "
            "first ones and those that are watched are not; train for more epochs",
        )  # fmt: skip
        run = run_result(done, [*self.said[0], *self._watched()], timed, metrics)
        run = replace(run, **_reached(targets, run))
        if run.step_seconds is None:
            return run
        step = run.step_seconds.median
        if run.seconds_per_epoch is None and steps_of_epoch:
            run = replace(run, seconds_per_epoch=step * steps_of_epoch)
        if not metrics and asked_steps:
            run = replace(run, seconds=step * asked_steps)
        return run

    def _turns(self) -> list[list[events.TurnEnded]]:
        every = (self.of(events.TurnEnded, rank) for rank in range(self.cell.devices))
        return [[turn for turn in turns if turn.mode == "timed"] for turns in every]

    def _timed(self) -> TimedSteps:
        """The first step of a turn is not timed. A step begins when the last rank has its data:
        ranks that have theirs before wait for it inside their step.

            step = max over ranks (loading + seconds) - max over ranks (loading)"""
        steps: list[float] = []
        samples, waiting, wall = 0, 0.0, 0.0
        for turns in zip(*self._turns(), strict=True):
            for of_ranks in list(zip(*map(_steps, turns), strict=True))[1:]:
                rows = of_ranks[0][2]
                samples += rows
                loading = max(loading for _, loading, _ in of_ranks)
                whole = max(seconds + loading for seconds, loading, _ in of_ranks)
                if rows == self.cell.batch:
                    steps.append(whole - loading)
                waiting += loading
                wall += whole
        return TimedSteps(steps, samples, waiting, wall)

    def _utilisation(self) -> dict[str, Any]:
        """Processor time over wall time and cores of a rank; of GPUs what NVML says."""
        shares = [
            share if self.cuda else share / cores
            for turns, cores in zip(self._turns(), self.processors, strict=True)
            if (share := _utilisation(turns)) is not None
        ]
        if not shares:
            return {}
        of = "NVML: time with a kernel running" if self.cuda else "processor time"
        return {"utilisation": fmean(shares), "utilisation_of": of}

    def _watched(self) -> Iterator[events.RunEvent]:
        """What was seen on all ranks, as one event each."""
        done = self.spent()[1]
        if memory := self.last(events.MemoryPeak):
            yield events.MemoryTracked(step=done, peak_bytes=tuple(event.peak for event in memory))
        if recordings := self.recordings():
            sent = [event.sent for event in self.last(events.RankRecorded)]
            yield steps_recorded(recordings, sent, steps=(done,))

    def recordings(self) -> list[Recording]:
        """What every rank recorded, if all did."""
        recorded = [event.recording for event in self.last(events.RankRecorded)]
        return recorded if len(recorded) == self.cell.devices else []

    def trace(self) -> dict[str, Any] | None:
        recordings = self.recordings()
        return chrome_trace(recordings) if recordings else None

    def draw(self, folder: Path) -> None:
        """Writes TensorBoard logs: seconds by step (of rank 0), loss and metrics by epoch, memory,
        shares of the recorded steps, and each layout as text."""
        board = TensorBoard(folder)
        for event in [*self.said[0], *self._watched()]:
            if not isinstance(event, events.TurnEnded) or event.mode == "timed":
                board.log(event)
        board.close()


def _steps(turn: events.TurnEnded) -> Iterator[tuple[float, float, int]]:
    loading = (seconds or 0.0 for seconds in turn.loading)
    return zip(_seconds(turn), loading, turn.rows, strict=True)


def _seconds(turn: events.TurnEnded) -> list[float]:
    return [seconds or 0.0 for seconds in turn.seconds]


def _utilisation(turns: Sequence[events.TurnEnded]) -> float | None:
    """The mean over the time of turns that tell."""
    told = [(turn.utilisation, turn.wall) for turn in turns if turn.utilisation is not None]
    wall = sum(seconds for _, seconds in told)
    return sum(share * seconds for share, seconds in told) / wall if wall else None


def _reached(targets: Sequence[Target], run: RunResult) -> dict[str, Any]:
    reached = [target.reached(run.metrics) for target in targets]
    return {"to_target": reached[0] if reached else None, "further_targets": tuple(reached[1:])}


def _require_finite(measured: Sequence[events.EpochMeasured]) -> None:
    for event in measured:
        loss, epoch = event.loss, event.epoch
        if loss is not None and not isfinite(loss):
            raise ValueError(
                f"training diverged: loss is {loss} after epoch {epoch}: a smaller learning rate "
                "may help"
            )
        for name, value in event.metrics.items():
            if not isfinite(value):
                finite = "" if loss is None else f", though the epoch's mean loss is {loss:.4g}"
                raise ValueError(
                    f"the workload's metric gave {name}={value} after epoch {epoch}{finite}: see "
                    "whether it divides by 0, or training diverged in the last steps"
                )
