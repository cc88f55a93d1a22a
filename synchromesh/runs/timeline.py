"""Timelines of recorded steps: a Chrome trace of all of them, which Perfetto (ui.perfetto.dev) and
chrome://tracing show, and the last one as the picture of a report has it.

A Chrome trace has a process per rank, a thread per lane and a marker at each step. Format: "Trace
Event Format", Google, JSON object form: `X` complete events, `M` metadata, `i` instants; in us."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synchromesh.results.run import TimelineSpan, joined
from synchromesh.runs.profile_ranges import HOST
from synchromesh.runs.shares import waits
from synchromesh.runs.spans import Intervals, Recording, Span, common, union

Event = dict[str, Any]


def chrome_trace(
    recordings: Sequence[Recording], shortest_us: float = 5.0, **notes: Any
) -> dict[str, Any]:
    """The document of what went on in the steps, with times since the earliest.

    shortest_us: microseconds below which computations are left out (in the steps of small models
    nine tenths of all), and said so in `otherData`, which has `notes` besides. What runs between
    operators (`host`) is never drawn. What a rank waits for others has a thread of its own."""
    starts = [s.start for r in recordings for s in r.spans if s.end > r.steps[0][0]]
    origin = min(starts + [start for r in recordings for start, _ in r.steps])
    events: list[Event] = []
    dropped = 0
    for recording, waiting in zip(recordings, waits(recordings), strict=True):
        drawn = _inside_steps(recording)
        kept = [s for s in drawn if s.kind == "communication" or s.seconds * 1e6 >= shortest_us]
        dropped += len(drawn) - len(kept)
        events += _process(recording, origin, kept, waiting)
    left_out = {"computations_left_out": dropped, "shorter_than_us": shortest_us}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**notes, **left_out}}


def write_chrome_trace(path: Path, document: dict[str, Any]) -> None:
    """Writes it gzip-compressed, which both viewers open as it is."""
    path.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))


def _inside_steps(recording: Recording) -> list[Span]:
    first, last = recording.steps[0][0], recording.steps[-1][1]
    return [s for s in recording.spans if s.start < last and s.end > first and s.name != HOST]


def _process(
    recording: Recording, origin: float, spans: Sequence[Span], waiting: Intervals
) -> Iterator[Event]:
    """A rank: thread 0 has the steps, one for each lane its spans, the last what it waits.

    origin: the time that is 0 in the trace."""
    rank = recording.rank
    lanes = dict.fromkeys(span.lane for span in spans)
    threads, last = {lane: n for n, lane in enumerate(lanes, 1)}, 1 + len(lanes)

    def metadata(what: str, **value: Any) -> Event:
        return {"ph": "M", "pid": rank, "name": what, "args": value}

    def complete(thread: int, name: str, kind: str, start: float, end: float) -> Event:
        times = {"ts": _us(start - origin), "dur": _us(end - start)}
        return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": kind, **times}

    yield metadata("process_name", name=f"rank {rank}")
    yield metadata("process_sort_index", sort_index=rank)
    named = {"steps": 0, **threads}
    if waiting:
        named["waiting for other ranks"] = last
    for name, thread in named.items():
        yield {"tid": thread, **metadata("thread_name", name=name)}
    for number, (start, end) in enumerate(recording.steps, 1):
        yield complete(0, f"step {number}", "step", start, end)
        begins = {"name": f"step {number} begins", "ts": _us(start - origin)}
        yield {"ph": "i", "pid": rank, "tid": 0, **begins, "s": "p"}
    for span in spans:
        args = {"args": {"ranks": list(span.ranks)}} if span.ranks else {}
        yield {**complete(threads[span.lane], span.name, span.kind, span.start, span.end), **args}
    for start, end in waiting:
        yield complete(last, "waiting", "waiting", start, end)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def timeline(recordings: Sequence[Recording], parts: int = 500) -> tuple[TimelineSpan, ...]:
    """The last recorded step of every rank, from the first beginning on. A rank that waits for
    another has a span beside the communication. parts: of the step; shorter spans and pauses
    are not seen."""
    origin = min(r.steps[-1][0] for r in recordings)
    finest = max(end - start for r in recordings for start, end in r.steps[-1:]) / parts
    return tuple(
        replace(span, start=span.start - origin, end=span.end - origin)
        for recording, waiting in zip(recordings, waits(recordings), strict=True)
        for span in _last_step(recording, waiting, finest)
    )


def _last_step(recording: Recording, waiting: Intervals, finest: float) -> Iterator[TimelineSpan]:
    rank, step = recording.rank, recording.steps[-1]
    whole = union([step])

    def seen(intervals: Intervals) -> Intervals:
        return tuple((a, b) for a, b in joined(intervals, finest) if b - a >= finest)

    busy = union((s.start, s.end) for s in recording.spans if s.kind == "computation")
    for start, end in seen(common(busy, whole)):
        yield TimelineSpan(rank, start, end, "computation")
    for span in (s for s in recording.spans if s.kind == "communication"):
        start, end = max(span.start, step[0]), min(span.end, step[1])
        if end - start >= finest:
            yield TimelineSpan(rank, start, end, "communication", span.name)
    for start, end in seen(common(waiting, whole)):
        yield TimelineSpan(rank, start, end, "waiting")
