"""The log of `synchromesh train` as results: one run (docs/runs.md has the events).

What was measured is of the last call (a run that was resumed had several), and of the plan that it
ended with; metrics are of all calls. Steps are timed without the first `WARM_UP`, special ones
(recorded, measured, switched) and such as have fewer rows than the batch."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from synchromesh.results.run import (
    CommunicationShares,
    ComponentLayout,
    Epoch,
    Layouts,
    MemoryByKind,
    Quartiles,
    RunResult,
    TimelineSpan,
)
from synchromesh.results.study import Settings, StudyMachine, StudyResults
from synchromesh.values import document, fields

WARM_UP = 13  # steps; as training/loop.py, which does not time them either
EPOCH = (
    "event", "time", "epoch", "step", "loss", "seconds", "samples_per_second", "trained_seconds",
    "elapsed_seconds", "utilisation",
)  # fmt: skip
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
Event = Mapping[str, Any]


def of_log(events: Sequence[Event], name: str, trace: str | None = None,
           timeline: tuple[TimelineSpan, ...] = ()) -> StudyResults:  # fmt: skip
    """The document of a run. trace: the file with the trace of its recorded steps. timeline: of
    one of these. ValueError begins with `name` where an event is not as it should be."""
    if not _all(events, "start"):
        raise ValueError(
            f"{name}: has no `start` event: an older version wrote it, or the run ended before "
            "its first step; train anew"
        )
    call = _last_call(events)
    start = call[0]
    with document.at(name):
        run = replace(
            _run(call, trace, timeline),
            metrics=(metrics := _metrics(events)),
            seconds=metrics[-1].seconds if metrics else None,
        )
        machine = _dict(_sequence(start, "machines")[0]) if start.get("machines") else {}
        return StudyResults(
            title=run.workload,
            created=datetime.fromtimestamp(_number(start, "time") or 0.0, UTC).isoformat(
                timespec="seconds"
            ),
            command=_command(start),
            machine=_machine(machine),
            runs=(run,),
            settings=Settings((run.strategy,), (run.devices,), (run.batch,), (run.seed,)),
            emulated=run.emulated,
            versions={
                str(key): str(value) for key, value in _dict(start.get("versions", {})).items()
            },
        )


def _run(
    events: Sequence[Event], trace: str | None, timeline: tuple[TimelineSpan, ...]
) -> RunResult:
    """What was measured in one call."""
    start = events[0]
    batch = document.integer(start.get("batch_size"), "batch_size", 1)
    layouts = _layouts(events)
    seconds, loading, rows = _timed(events, batch, layouts[-1].step if layouts else 0)
    prediction = next(iter(_all(events, "prediction")), {})
    switches = [e for e in _all(events, "adapt") if e.get("switched")]
    memory = next(iter(reversed(_all(events, "memory"))), {})
    recording = next(iter(reversed(_all(events, "recording"))), {})
    shares = _dict(recording.get("mean", {}))
    epochs = [s for e in _all(events, "epoch") if (s := _number(e, "seconds")) is not None]
    peaks = [p for p in prediction.get("memory_bytes") or () if isinstance(p, int)]
    utilisation, of = _utilisation(events, start)
    exposed, hidden = _number(shares, "exposed"), _number(shares, "hidden")
    plan = layouts[-1].plan if layouts else str(start.get("plan", ""))
    by_step, peak = _number(prediction, "step_seconds"), max(peaks, default=None)
    if switches:  # of the plan that steps are timed under
        by_step, peak = _number(switches[-1], "predicted_after"), None
    asked = "auto" if _all(events, "choice") else (layouts[0].plan if layouts else plan)
    end = _all(events, "end")
    return RunResult(
        workload=document.text(start.get("workload"), "workload"),
        strategy=asked,
        devices=document.integer(start.get("ranks"), "ranks", 1),
        batch=batch,
        seed=document.integer(start.get("seed", 0), "seed", 0, 2**63),
        status="done" if seconds or end else "failed",
        plan=plan,
        reason="" if end else "the run has not ended: it is still going on, or was killed",
        step_seconds=Quartiles.of(seconds),
        timed_steps=len(seconds),
        samples_per_second=rows / (sum(seconds) + sum(loading)) if seconds else None,
        data_waiting_share=sum(loading) / (sum(seconds) + sum(loading)) if seconds else None,
        seconds_per_epoch=median(epochs) if epochs else None,
        epoch_seconds=Quartiles.of(epochs),
        communication_share=None
        if exposed is None or hidden is None
        else CommunicationShares(exposed, hidden),
        computation_share=_number(shares, "computation"),
        waiting_share=_number(shares, "waiting"),
        utilisation=utilisation,
        utilisation_of=of,
        peak_memory_bytes=tuple(
            MemoryByKind(**{kind: int(_dict(device).get(kind) or 0) for kind in KINDS})
            for device in memory.get("peak_bytes") or ()
        ),
        sent_bytes_per_step=tuple(int(n) for n in recording.get("sent_bytes_per_step") or ()),
        predicted_step_seconds=by_step,
        predicted_peak_bytes=peak,
        layouts=layouts,
        timeline=timeline,
        trace=trace,
        emulated=document.boolean(start.get("emulated", False), "emulated"),
    )


def _last_call(events: Sequence[Event]) -> Sequence[Event]:
    """Of the last call that trained: one that resumed a run may have had another plan, on other
    ranks."""
    begins = [i for i, event in enumerate(events) if event.get("event") == "start"]
    calls = [events[a:b] for a, b in zip(begins, [*begins[1:], len(events)], strict=True)]
    trained = [call for call in calls if _all(call, "steps")]
    return trained[-1] if trained else calls[-1]


def _timed(
    events: Sequence[Event], batch: int, switched: int
) -> tuple[list[float], list[float], int]:
    """Seconds of the steps that count, of waiting for their batches, and all their rows. switched:
    steps before the plan in force."""
    seconds: list[float] = []
    loading: list[float] = []
    first: int | None = None
    for event in _all(events, "steps"):
        special = set(event.get("special") or ())
        begin = document.integer(event.get("first"), "steps.first")
        first = begin if first is None else first
        columns = [_sequence(event, key) for key in ("seconds", "loading", "rows")]
        for step, (taken, waited, rows) in enumerate(zip(*columns, strict=True), begin):
            begun = first + WARM_UP <= step and switched < step
            if step in special or not begun or rows != batch or taken is None:
                continue
            seconds.append(document.number(taken, "steps.seconds"))
            loading.append(document.number(waited or 0.0, "steps.loading"))
    return seconds, loading, batch * len(seconds)


def _metrics(events: Sequence[Event]) -> tuple[Epoch, ...]:
    """Of all calls: a resumed run goes on with the seconds of the one before."""
    found: list[Epoch] = []
    before = last = 0.0
    for event in events:
        if event.get("event") == "start":
            before = last
        if event.get("event") != "epoch":
            continue
        last = before + (_number(event, "trained_seconds") or 0.0)
        values = {
            re.sub(r"^valid_", "", key): document.number(value, f"epoch.{key}", float("-inf"))
            for key, value in event.items()
            if key not in EPOCH and value is not None
        }
        number = document.integer(event.get("epoch"), "epoch.epoch")
        step = document.integer(event.get("step"), "epoch.step")
        found.append(Epoch(number, step, last, _number(event, "loss", float("-inf")), values))
    return tuple(found)


def _layouts(events: Sequence[Event]) -> tuple[Layouts, ...]:
    found: list[Layouts] = []
    for event in _all(events, "layout"):
        components = tuple(
            fields.of_plain(ComponentLayout, component, f"layout.components[{i}]")
            for i, component in enumerate(_sequence(event, "components"))
        )
        stretch = Layouts(
            document.integer(event.get("step", 0), "layout.step"),
            document.text(event.get("plan"), "layout.plan"),
            components,
            document.text(event.get("reason") or "", "layout.reason"),
            paused_seconds=_number(event, "pause_seconds"),
            moved_bytes=None if event.get("bytes_moved") is None else int(event["bytes_moved"]),
        )
        if not found or found[-1].plan != stretch.plan:  # not of a run that went on as it was
            found.append(stretch)
    return tuple(found)


def _utilisation(events: Sequence[Event], start: Event) -> tuple[float | None, str]:
    """The mean over epochs and ranks, and what it is a share of."""
    values = [
        v for e in _all(events, "epoch") for v in e.get("utilisation") or () if v is not None
    ]
    numbers = [document.number(value, "epoch.utilisation") for value in values]
    machines = start.get("machines") or [{}]
    on_cpu = _dict(machines[0]).get("device", "cpu") == "cpu"
    of = "processor time over wall time" if on_cpu else "time in which a kernel ran, by NVML"
    return (fmean(numbers), of) if numbers else (None, "")


def _machine(machine: Mapping[str, Any]) -> StudyMachine:
    device = str(machine.get("device", "cpu"))
    return StudyMachine(
        str(machine.get("processor") or ""),
        int(machine.get("cores") or 0),
        int(machine.get("memory_bytes") or 0),
        () if device == "cpu" else (device,),
        str(machine.get("system") or ""),
    )


def _command(start: Event) -> str:
    words = start.get("command") or ()
    return words if isinstance(words, str) else shlex.join(["synchromesh", *map(str, words)])


def _all(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event.get("event") == kind]


def _number(event: Event, key: str, least: float = 0.0) -> float | None:
    value = event.get(key)
    return None if value is None else document.number(value, key, least)


def _sequence(event: Event, key: str) -> list[Any]:
    return document.sequence(event.get(key), key)


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"should be a mapping, not {document.kind(value)}")
    return value
