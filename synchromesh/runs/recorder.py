"""The recorder: the spans of training steps on this rank, by PyTorch's profiler.

with Recorder(device) as recorder:
    barrier()  # to start the profiler takes up to seconds, and not the same on all ranks
    with recorder.step():
        train(batch)
recorder.recording

Those of several ranks are brought to one clock by `gathered`."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from synchromesh.engine.groups import Group
from synchromesh.launcher.machine import boot
from synchromesh.runs import calls
from synchromesh.runs.calls import communication_name
from synchromesh.runs.profile_ranges import Range, cpu_spans
from synchromesh.runs.spans import Interval, Recording, Span, by_start


class Recorder:
    """Records what runs inside it: DDP, FSDP2, torch's pipelining and our engine alike. recording:
    of this rank, once it has ended; times are of this machine's system clock."""

    OPERATOR = 0  # RecordScope::FUNCTION, a call through torch's dispatcher

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Interval] = []
        self._recording: Recording | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes two lines to stderr
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)  # else 2.11 warns
        self._stack.enter_context(self._profile)
        self._stack.enter_context(calls.annotated())
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._stack.__exit__(*error)
        if error[0] is None:
            self._recording = Recording(calls.rank(), tuple(self.steps), self._spans())
        del self._profile

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step: shares are of the time inside."""
        began = time.perf_counter()
        yield
        self.step_ended(began)

    def step_ended(self, began: float) -> None:
        """The end, waited for on CUDA, of a step that began then, by `time.perf_counter`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, now = time.perf_counter() - began, time.time_ns() * 1e-9
        self.steps.append((now - seconds, now))

    @property
    def recording(self) -> Recording:
        """What was recorded. RuntimeError before the end."""
        if self._recording is None:
            raise RuntimeError("a recording can be read once its `with Recorder(...)` has ended")
        return self._recording

    def _spans(self) -> tuple[Span, ...]:
        inner: Any = self._profile.profiler
        events = inner.kineto_results.events()
        if self.device.type == "cuda":
            on_device = (e for e in events if e.device_type().name == "CUDA")
            return by_start(_device_span(e) for e in on_device if not e.is_user_annotation())
        ranges = (
            Range(
                e.start_ns() * 1e-9, (e.start_ns() + e.duration_ns()) * 1e-9, e.name(),
                e.device_resource_id(), e.scope() == self.OPERATOR,
            )
            for e in events
        )  # fmt: skip
        return cpu_spans(ranges, calls.everyone(), self.steps, threading.get_native_id())


def _device_span(event: Any) -> Span:
    """A kernel or copy; NCCL's with its metadata's ranks. By kineto's documentation, untested."""
    start, name = event.start_ns() * 1e-9, event.name()
    end, lane = start + event.duration_ns() * 1e-9, f"stream {event.device_resource_id()}"
    if not name.startswith("nccl"):
        return Span(start, end, "computation", name, lane)
    try:
        metadata = json.loads(f"{{{event.metadata_json().strip().rstrip(',')}}}")
        ranks = tuple(json.loads(metadata["Process Group Ranks"]))
    except (KeyError, TypeError, ValueError):
        ranks = ()
    return Span(start, end, "communication", communication_name(name) or name, lane, ranks)


def common_clock(group: Group, exchanges: int = 16) -> float:
    """Seconds that rank 0's clock (of the group) shows more than this rank's; all call alike.

    Processes of one machine share its system clock. To another machine's, the offset is by
    Cristian's algorithm (Distributed Computing 3, 1989): a rank sends at `a`, rank 0 answers with
    its time `t`, the answer is there at `b`; rank 0's clock then shows t + (b - a) / 2, and is off
    by (b - a) / 2 at most. The least of the round trips of so many `exchanges` (chosen) counts."""
    machines = group.all_gather_json(boot())
    offset = 0.0
    with group.world.ledger.paused():
        for index in range(1, group.size):
            if machines[index] == machines[0]:
                continue
            if group.index == index:
                offset = _asked(group, exchanges)
            elif group.index == 0:
                _answer(group, index, exchanges)
    return offset


def gathered(recording: Recording, group: Group) -> list[Recording]:
    """The recordings of all members, on one clock; all members call alike."""
    own = recording.later(common_clock(group)).to_dict()
    return [Recording.from_dict(value) for value in group.all_gather_json(own)]


def _number(group: Group, value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=group.world.device)


def _asked(group: Group, exchanges: int) -> float:
    trips: list[tuple[int, float]] = []
    for _ in range(exchanges):
        answer, began = _number(group), time.time_ns()
        group.exchange([(0, _number(group))], [])
        group.exchange([], [(0, answer)])
        there = int(answer)
        ended = time.time_ns()
        trips.append((ended - began, there - (began + ended) / 2))
    return min(trips)[1] * 1e-9


def _answer(group: Group, index: int, exchanges: int) -> None:
    for _ in range(exchanges):
        question = _number(group)
        group.exchange([], [(index, question)])
        group.exchange([(index, _number(group, time.time_ns()))], [])
