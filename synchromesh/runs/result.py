"""A run's results, from its events: those of the log of `train`, or of the ranks of a study."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from synchromesh.results.run import CommunicationShares, Epoch, Layouts, Quartiles, RunResult
from synchromesh.runs.events import (
    EpochMeasured,
    LayoutInForce,
    MemoryTracked,
    PlanDecided,
    RunEvent,
    RunStarted,
    StepPredicted,
    StepsRecorded,
)

E = TypeVar("E", bound=RunEvent)


@dataclass(frozen=True)
class TimedSteps:
    """Steps that are samples of what a step takes.

    seconds   of each that has all rows
    rows      of all
    loading   seconds of waiting for their batches
    wall      seconds end to end"""

    seconds: Sequence[float]
    rows: int
    loading: float
    wall: float


def run_result(
    of: RunResult, events: Sequence[RunEvent], timed: TimedSteps, metrics: tuple[Epoch, ...]
) -> RunResult:
    """`of`, which says what was asked, with what `events` say was measured. metrics: `epochs` of
    the whole run, where that had several calls."""
    layouts, predicted = layouts_of(events), _predicted(events)
    lengths = Quartiles.of(
        [e.seconds for e in of_kind(EpochMeasured, events) if e.seconds is not None]
    )
    return replace(
        _watched(of, events),
        step_seconds=Quartiles.of(timed.seconds),
        timed_steps=len(timed.seconds),
        samples_per_second=timed.rows / timed.wall if timed.wall else None,
        data_waiting_share=timed.loading / timed.wall if timed.wall else None,
        seconds_per_epoch=None if lengths is None else lengths.median,
        epoch_seconds=lengths,
        metrics=metrics,
        seconds=metrics[-1].seconds if metrics else None,
        predicted_step_seconds=predicted.step_seconds,
        predicted_peak_bytes=predicted.peak_bytes,
        layouts=layouts,
    )


def of_kind(kind: type[E], events: Iterable[RunEvent]) -> list[E]:
    """The events of a kind, in order."""
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
    """The layouts that were in force one after the other; a run that was resumed under its plan
    goes on with that."""
    made: list[Layouts] = []
    for event in of_kind(LayoutInForce, events):
        if not made or made[-1].plan != event.plan:
            made.append(event.layouts)
    return tuple(made)


def _predicted(events: Iterable[RunEvent]) -> StepPredicted:
    """Of the plan that steps are timed under, the last one."""
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
        of = replace(
            of,
            communication_share=_communication(recorded),
            computation_share=recorded.share("computation"),
            waiting_share=recorded.share("waiting"),
            sent_bytes_per_step=recorded.sent_bytes_per_step,
        )
    return of


def _communication(recorded: StepsRecorded) -> CommunicationShares | None:
    exposed, hidden = recorded.share("exposed"), recorded.share("hidden")
    if exposed is None or hidden is None:
        return None
    return CommunicationShares(exposed, hidden)
