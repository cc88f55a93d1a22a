"""A simulated step: its seconds and their spread, what they go into, and who does what when.

    compute    seconds in which a device computes                                     of the device
    traffic    ... in which it waits for what is under way                            group that is
    bubble     ... for what has not begun, as others have not come                    ready last
    slower     ... by which devices that differ make the step longer, on average
    update     the optimizer's step
    host       calls and the agreement of a step

The shares of these sum to 1."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.cost.step_time import Recorded
from synchromesh.cost.timeline import RecordedSpan
from synchromesh.simulator.replay import Floats, Replay, Variation

QUANTILES = (0.05, 0.5, 0.95)
DRAWS = 100  # steps of which quantiles are taken


@dataclass(frozen=True)
class SimulatedStep:
    """seconds: the mean of all draws, of which `drawn` has each."""

    recorded: Recorded
    drawn: Floats
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return float(self.drawn.mean())

    @property
    def quantiles(self) -> dict[str, float]:
        found = np.quantile(self.drawn, QUANTILES).tolist()
        return {f"{q:g}": seconds for q, seconds in zip(QUANTILES, found, strict=True)}

    @property
    def shares(self) -> dict[str, float]:
        total = sum(self.parts.values())
        return {name: seconds / total if total else 0.0 for name, seconds in self.parts.items()}


def simulated(planned: PlannedStep, made: Recorded, variation: Variation) -> SimulatedStep:
    """The recorded step on devices that differ; where they do not, one draw says it."""
    ranks = [[planned.ranks[p] for p in its] for its in planned.positions]
    draws = DRAWS if variation.jitter else 1
    drawn = Replay(made, ranks, variation, draws).seconds()
    return SimulatedStep(made, drawn, parts(made, float(drawn.mean())))


def parts(made: Recorded, seconds: float) -> dict[str, float]:
    """What the seconds of a step go into, of the device group that is ready last."""
    time = made.time
    ends = [
        (spans[-1].end if spans else 0.0) + update
        for spans, update in zip(made.groups, made.updates, strict=True)
    ]
    last = made.groups[ends.index(max(ends))]
    waits = [span for span in last if span.what == "wait"]
    traffic, slower = sum(map(_moving, waits)), seconds - time.seconds
    return {
        "compute": sum(span.end - span.begin for span in last if span.what == "compute"),
        "traffic": traffic,
        "bubble": max(0.0, sum(span.end - span.begin for span in waits) - traffic),
        "slower": slower if abs(slower) > 1e-9 * seconds else 0.0,  # what adding up leaves
        "update": time.update,
        "host": time.seconds - time.forward - time.backward - time.update,
    }


def _moving(wait: RecordedSpan) -> float:
    """Seconds of a wait in which something of what it waits for is under way."""
    covered, until = 0.0, wait.begin
    for transfer in sorted(wait.transfers, key=lambda t: t.begin):
        begin, end = max(until, transfer.begin), min(wait.end, transfer.end)
        covered += max(0.0, end - begin)
        until = max(until, end)
    return covered


def trace_events(step: SimulatedStep, names: Sequence[str]) -> str:
    """The JSON of Perfetto and Chrome's tracing: a process for each device group, in which one
    thread computes and waits, and one for each kind of traffic. names: of the components."""
    return json.dumps({"traceEvents": [*_events(step, names)], "displayTimeUnit": "ms"})


def _events(step: SimulatedStep, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for group, spans in enumerate(step.recorded.groups):
        yield _named("process_name", group, f"device group {group}")
        for span in spans:
            if span.what == "come":
                (transfer,) = span.transfers
                yield _event(transfer.kind, group, transfer.kind, transfer.begin, transfer.end)
            elif span.end > span.begin:
                name = "wait" if span.what == "wait" else _label(span.of, names)
                yield _event(name, group, "device", span.begin, span.end)
        end = spans[-1].end if spans else 0.0
        yield _event("update", group, "device", end, end + step.recorded.updates[group])


def _label(of: Any, names: Sequence[str]) -> str:
    if of is None:
        return "compute"
    component, action = of
    return f"{names[component]} {action}"


def _named(kind: str, group: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": group, "args": {"name": name}}


def _event(name: str, group: int, thread: str, begin: float, end: float) -> dict[str, Any]:
    """Times are microseconds."""
    return {
        "ph": "X", "name": name, "pid": group, "tid": thread, "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
    }  # fmt: skip
