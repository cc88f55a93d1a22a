"""A run's results, from its events: of the log of `train` (docs/runs.md), or of a study's ranks.

What a log says was measured is of its last call (a run that was resumed had several), and of the
plan that it ended with; metrics are of all calls. Steps are timed without warm-up, special ones
(recorded, measured, switched) and such as have fewer rows than the batch."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, TypeVar

from synchromesh.results.run import (
    CommunicationShares,
    Epoch,
    Layouts,
    Quartiles,
    RunResult,
    TimelineSpan,
)
from synchromesh.results.study import StudyResults, StudySettings
from synchromesh.runs.events import (
    BatchSizeChanged,
    EpochMeasured,
    LayoutInForce,
    MemoryTracked,
    PlanChosen,
    PlanDecided,
    RunEnded,
    RunEvent,
    RunStarted,
    StepPredicted,
    StepsRecorded,
    StepsTimed,
)
from synchromesh.values import document

E = TypeVar("E", bound=RunEvent)
READ: Mapping[str, type[RunEvent]] = {
    kind.name: kind
    for kind in (
        RunStarted, LayoutInForce, StepPredicted, PlanChosen, StepsTimed, StepsRecorded,
        MemoryTracked, PlanDecided, BatchSizeChanged, EpochMeasured, RunEnded,
    )
}  # fmt: skip


@dataclass(frozen=True)
class TimedSteps:
    """Steps that are samples of what one takes. seconds: of each with all rows; rows: of all;
    loading: seconds of waiting for batches; wall: seconds end to end."""

    seconds: Sequence[float]
    rows: int
    loading: float
    wall: float


def run_result(
    of: RunResult, events: Sequence[RunEvent], timed: TimedSteps, metrics: tuple[Epoch, ...]
) -> RunResult:
    """`of`, which says what was asked, with what `events` measured. metrics: of the whole run."""
    layouts, predicted = layouts_of(events), _predicted(events)
    ends = of_kind(EpochMeasured, events)
    lengths = Quartiles.of([end.seconds for end in ends if end.seconds is not None])
    return replace(
        _watched(of, events), step_seconds=Quartiles.of(timed.seconds),
        timed_steps=len(timed.seconds),
        samples_per_second=timed.rows / timed.wall if timed.wall else None,
        data_waiting_share=timed.loading / timed.wall if timed.wall else None,
        seconds_per_epoch=None if lengths is None else lengths.median, epoch_seconds=lengths,
        metrics=metrics, seconds=metrics[-1].seconds if metrics else None,
        predicted_step_seconds=predicted.step_seconds, predicted_peak_bytes=predicted.peak_bytes,
        layouts=layouts,
        staleness=next((e.staleness for e in reversed(of_kind(RunEnded, events))), None),
    )  # fmt: skip


def of_kind(kind: type[E], events: Iterable[RunEvent]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def epochs(events: Iterable[RunEvent]) -> tuple[Epoch, ...]:
    """Of all calls: a resumed run goes on with the seconds of the one before."""
    made: list[Epoch] = []
    before = last = 0.0
    for event in events:
        if isinstance(event, RunStarted):
            before = last
        elif isinstance(event, EpochMeasured):
            last = before + (event.trained_seconds or 0.0)
            made.append(Epoch(event.epoch, event.step, last, event.loss, event.metrics))
    return tuple(made)


def layouts_of(events: Iterable[RunEvent]) -> tuple[Layouts, ...]:
    """The layouts in force one after the other; a resumed run may go on with the last one."""
    made: list[Layouts] = []
    for event in of_kind(LayoutInForce, events):
        if not made or made[-1].plan != event.plan:
            made.append(event.layouts)
    return tuple(made)


def _predicted(events: Iterable[RunEvent]) -> StepPredicted:
    last = StepPredicted()
    for event in events:
        if isinstance(event, StepPredicted):
            last = event
        elif isinstance(event, PlanDecided) and event.switched:
            last = StepPredicted(step_seconds=event.predicted_after)
    return last


def _watched(of: RunResult, events: Sequence[RunEvent]) -> RunResult:
    """`of` with what was seen in steps that were watched, when that was done for the last time."""
    for memory in of_kind(MemoryTracked, events):
        of = replace(of, peak_memory_bytes=memory.peak_bytes)
    for recorded in of_kind(StepsRecorded, events)[-1:]:
        exposed, hidden = recorded.share("exposed"), recorded.share("hidden")
        if exposed is not None and hidden is not None:
            of = replace(of, communication_share=CommunicationShares(exposed, hidden))
        of = replace(
            of, computation_share=recorded.share("computation"),
            waiting_share=recorded.share("waiting"),
            sent_bytes_per_step=recorded.sent_bytes_per_step,
        )  # fmt: skip
    return of


def of_log(lines: Sequence[Mapping[str, Any]], name: str, trace: str | None = None,
           timeline: tuple[TimelineSpan, ...] = ()) -> StudyResults:  # fmt: skip
    """The document of a run. trace: the file with the trace of its recorded steps. timeline: of
    one of these. ValueError begins with `name` where an event is not as it should be."""
    if not any(line.get("event") == RunStarted.name for line in lines):
        raise ValueError(
            f"{name}: has no `start` event: an older version wrote it, or the run ended before "
            "its first step; train anew"
        )
    with document.at(name):
        events = [READ[e["event"]].of(e) for e in lines if e.get("event") in READ]
        start, *call = _last_call(events)
        assert isinstance(start, RunStarted)
        steps = _timed(call, start.batch_size)
        run = run_result(_asked(start, call), call, steps, epochs(events))
        run = replace(run, **_utilisation(call, start), timeline=timeline, trace=trace)
        if not steps.seconds and not run_ended(call):
            run = replace(run, status="failed")
        created, command = datetime.fromtimestamp(start.time or 0.0, UTC), start.command or ()
        if not isinstance(command, str):
            command = shlex.join(["synchromesh", *map(str, command)])
        return StudyResults(
            title=run.workload, created=created.isoformat(timespec="seconds"),
            command=command, machine=start.first_machine.of_study, runs=(run,),
            settings=StudySettings((run.strategy,), (run.devices,), (run.batch,), (run.seed,)),
            emulated=run.emulated,
            versions={str(key): str(value) for key, value in start.versions.items()},
        )  # fmt: skip


def run_ended(call: Sequence[RunEvent]) -> bool:
    return bool(of_kind(RunEnded, call))


def _asked(start: RunStarted, call: Sequence[RunEvent]) -> RunResult:
    """What the call was asked for, and under which plan it went on."""
    layouts = layouts_of(call)
    first = layouts[0].plan if layouts else start.plan
    return RunResult(
        start.workload, "auto" if of_kind(PlanChosen, call) else first, start.ranks,
        start.batch_size, start.seed, "done", layouts[-1].plan if layouts else start.plan,
        "" if run_ended(call) else "the run has not ended: it is still going on, or was killed",
        emulated=start.emulated,
    )  # fmt: skip


def _last_call(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
    """Of the last call that trained: the plan and ranks of those before may have been others."""
    begins = [i for i, event in enumerate(events) if isinstance(event, RunStarted)]
    calls = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)], strict=True)]
    trained = [call for call in calls if of_kind(StepsTimed, call)]
    return trained[-1] if trained else calls[-1]


def _timed(call: Sequence[RunEvent], batch: int) -> TimedSteps:
    """Steps after warm-up, under the plan in force, that have all rows and are not special."""
    layouts = layouts_of(call)
    begin = 1 + (layouts[-1].step if layouts else 0)
    for change in of_kind(BatchSizeChanged, call):
        begin, batch = max(begin, change.step + 1), change.to
    for event in of_kind(StepsTimed, call)[:1]:
        begin = max(begin, event.first + RunResult.WARM_UP_STEPS)
    taken = [step for step in _steps(call) if step[0] >= begin and step[3] == batch]
    loading = sum(waited for _, _, waited, _ in taken)
    samples = [seconds for _, seconds, _, _ in taken]
    return TimedSteps(samples, batch * len(taken), loading, sum(samples) + loading)


def _steps(call: Sequence[RunEvent]) -> Iterator[tuple[int, float, float, int]]:
    """Number, seconds, seconds of loading and rows of each step that is not special."""
    for event in of_kind(StepsTimed, call):
        columns = event.seconds, event.loading, event.rows
        for step, (seconds, waited, rows) in enumerate(zip(*columns, strict=True), event.first):
            if step not in event.special and seconds is not None:
                yield step, seconds, waited or 0.0, rows


def _utilisation(call: Sequence[RunEvent], start: RunStarted) -> dict[str, Any]:
    by_epoch = [event.utilisation or () for event in of_kind(EpochMeasured, call)]
    shares = [share for of_ranks in by_epoch for share in of_ranks if share is not None]
    if not shares:
        return {}
    on_cpu = start.first_machine.device == "cpu"
    of = "processor time over wall time" if on_cpu else "time in which a kernel ran, by NVML"
    return {"utilisation": fmean(shares), "utilisation_of": of}
