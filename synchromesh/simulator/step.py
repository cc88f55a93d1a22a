"""A simulated step: its seconds and their spread, what they go into, and who does what when.

    compute    seconds in which a device computes                                     of the device
    traffic    ... in which it waits for what is under way                            group that is
    bubble     ... for what has not begun, as others have not come                    ready last
    slower     ... by which devices that differ make the step longer, on average
    update     the optimizer's step
    host       calls and the agreement of a step

The shares of these sum to 1. Workers that train alone meet every H steps (`local:H`), or go on
without each other (`simulator/asynchronous.py`), on average over which a step is then."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.cost.step_time import Recorded
from synchromesh.cost.timeline import RecordedSpan
from synchromesh.simulator.asynchronous import NO_MESSAGES, MessageSeconds, WorkersWalk, walk
from synchromesh.simulator.asynchronous import TUNING as WALK
from synchromesh.simulator.replay import Floats, Replay, Variation

QUANTILES = (0.05, 0.5, 0.95)
DRAWS = 100  # steps of which quantiles are taken


@dataclass(frozen=True)
class SimulatedStep:
    """seconds: the mean of all draws, of which `drawn` has each. workers: of those that go on
    without each other."""

    recorded: Recorded
    drawn: Floats
    parts: Mapping[str, float] = field(default_factory=dict)
    workers: WorkersWalk | None = None

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


def simulated(
    planned: PlannedStep, made: Recorded, variation: Variation,
    messages: MessageSeconds = NO_MESSAGES,
) -> SimulatedStep:  # fmt: skip
    """The recorded step on devices that differ; where they do not, one draw says it. A step that
    goes on while others do is longer as all of these are. messages: of workers that go on without
    each other."""
    ranks = [[planned.ranks[p] for p in its] for its in planned.positions]
    sync, alike = planned.plan.sync, not variation.jitter
    together = 1 if alike else max(1, sync.steps)  # steps from one meeting to the next
    draws = 1 if alike else together * max(1, DRAWS // together)
    run = made.run or made
    replay = Replay(run, ranks, variation, draws)
    if not sync.alone:
        drawn = replay.seconds() * (made.time.seconds / run.time.seconds)
        return SimulatedStep(made, drawn, parts(made, float(drawn.mean())))
    own = replay.worker_seconds(_workers(planned))
    if sync.asynchronous:
        dedicated = len(planned.plan.servers or ())  # the first data indices, without rows
        own = own[:, dedicated:]
        steps = WALK.of(own.shape[1], sync.servers)
        computing = np.resize(own, (steps, own.shape[1]))
        return _asynchronous(made, walk(sync, computing, messages, dedicated > 0))
    met = own.reshape(-1, together, own.shape[1]).sum(axis=1).max(axis=1) / together
    drawn = met + made.time.exchanged
    return SimulatedStep(made, drawn, parts(made, float(drawn.mean())))


def _workers(planned: PlannedStep) -> list[list[int]]:
    """The data index of each device, by group."""
    firsts = (planned.components(group)[0] for group in range(len(planned.positions)))
    layouts = (planned.partition.components[i].layout for i in firsts)
    by_group = zip(layouts, planned.positions, strict=True)
    return [[layout.data_index(p) for p in its] for layout, its in by_group]


def _asynchronous(made: Recorded, walked: WorkersWalk) -> SimulatedStep:
    """A step of each worker, on average over the walk."""
    seconds, own = walked.seconds / walked.steps, float(np.mean(walked.computed)) / walked.steps
    alone, into = made.time.seconds - made.time.exchanged, parts(made, seconds)
    into["traffic"] += seconds - own - made.time.exchanged
    into["slower"] = own - alone if abs(own - alone) > 1e-9 * own else 0.0
    return SimulatedStep(made, np.array([seconds]), into, walked)


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
        "traffic": traffic + time.exchanged,
        "bubble": max(0.0, sum(span.end - span.begin for span in waits) - traffic),
        "slower": slower if abs(slower) > 1e-9 * seconds else 0.0,  # what adding up leaves
        "update": time.update,
        "host": time.seconds - time.forward - time.backward - time.update - time.exchanged,
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
