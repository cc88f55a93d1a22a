"""The log of `synchromesh train` as results: one run (docs/runs.md has the events).

What was measured is of the last call (a run that was resumed had several), and of the plan that it
ended with; metrics are of all calls. Steps are timed without the first `WARM_UP`, special ones
(recorded, measured, switched) and such as have fewer rows than the batch."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from synchromesh.results.run import RunResult, TimelineSpan
from synchromesh.results.study import StudyResults, StudySettings
from synchromesh.runs.events import (
    EpochMeasured,
    LayoutInForce,
    MemoryTracked,
    PlanChosen,
    PlanDecided,
    RankMachine,
    RunEnded,
    RunEvent,
    RunStarted,
    StepPredicted,
    StepsRecorded,
    StepsTimed,
)
from synchromesh.runs.result import TimedSteps, epochs, layouts_of, of_kind, run_result
from synchromesh.values import document

WARM_UP = 13  # steps; as training/loop.py, which does not time them either
READ: Mapping[str, type[RunEvent]] = {
    kind.name: kind
    for kind in (
        RunStarted, LayoutInForce, StepPredicted, PlanChosen, StepsTimed, StepsRecorded,
        MemoryTracked, PlanDecided, EpochMeasured, RunEnded,
    )
}  # fmt: skip


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
        created = datetime.fromtimestamp(start.time or 0.0, UTC)
        return StudyResults(
            title=run.workload,
            created=created.isoformat(timespec="seconds"),
            command=_command(start),
            machine=_first_machine(start).of_study,
            runs=(run,),
            settings=StudySettings((run.strategy,), (run.devices,), (run.batch,), (run.seed,)),
            emulated=run.emulated,
            versions={str(key): str(value) for key, value in start.versions.items()},
        )


def run_ended(call: Sequence[RunEvent]) -> bool:
    return bool(of_kind(RunEnded, call))


def _asked(start: RunStarted, call: Sequence[RunEvent]) -> RunResult:
    """What the call was asked for, and under which plan it went on."""
    layouts = layouts_of(call)
    first = layouts[0].plan if layouts else start.plan
    return RunResult(
        workload=start.workload,
        strategy="auto" if of_kind(PlanChosen, call) else first,
        devices=start.ranks,
        batch=start.batch_size,
        seed=start.seed,
        status="done",
        plan=layouts[-1].plan if layouts else start.plan,
        reason=""
        if run_ended(call)
        else "the run has not ended: it is still going on, or was killed",
        emulated=start.emulated,
    )


def _last_call(events: Sequence[RunEvent]) -> Sequence[RunEvent]:
    """Of the last call that trained: one that resumed a run may have had another plan, on other
    ranks."""
    begins = [i for i, event in enumerate(events) if isinstance(event, RunStarted)]
    calls = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)], strict=True)]
    trained = [call for call in calls if of_kind(StepsTimed, call)]
    return trained[-1] if trained else calls[-1]


def _timed(call: Sequence[RunEvent], batch: int) -> TimedSteps:
    """Steps after warm-up, under the plan in force, that have all rows and are not special."""
    layouts = layouts_of(call)
    begin = max([layout.step for layout in layouts[-1:]], default=0) + 1
    for event in of_kind(StepsTimed, call)[:1]:
        begin = max(begin, event.first + WARM_UP)
    taken = [
        (seconds, waited)
        for step, seconds, waited, rows in _steps(call)
        if step >= begin and rows == batch
    ]
    loading = sum(waited for _, waited in taken)
    samples = [seconds for seconds, _ in taken]
    return TimedSteps(samples, batch * len(taken), loading, sum(samples) + loading)


def _steps(call: Sequence[RunEvent]) -> Iterator[tuple[int, float, float, int]]:
    """Number, seconds, seconds of loading and rows of each step that is not special."""
    for event in of_kind(StepsTimed, call):
        columns = event.seconds, event.loading, event.rows
        for step, (seconds, waited, rows) in enumerate(zip(*columns, strict=True), event.first):
            if step not in event.special and seconds is not None:
                yield step, seconds, waited or 0.0, rows


def _utilisation(call: Sequence[RunEvent], start: RunStarted) -> dict[str, Any]:
    """The mean over epochs and ranks, and what it is a share of."""
    by_epoch = [event.utilisation or () for event in of_kind(EpochMeasured, call)]
    shares = [share for of_ranks in by_epoch for share in of_ranks if share is not None]
    if not shares:
        return {}
    on_cpu = _first_machine(start).device == "cpu"
    of = "processor time over wall time" if on_cpu else "time in which a kernel ran, by NVML"
    return {"utilisation": fmean(shares), "utilisation_of": of}


def _first_machine(start: RunStarted) -> RankMachine:
    """That of rank 0."""
    return start.machines[0] if start.machines else RankMachine()


def _command(start: RunStarted) -> str:
    words = start.command or ()
    return words if isinstance(words, str) else shlex.join(["synchromesh", *map(str, words)])
