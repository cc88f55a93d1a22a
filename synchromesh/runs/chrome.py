"""The Chrome trace of a recording: one document that Perfetto (ui.perfetto.dev) and chrome://tracing
show, with a process per rank, a thread per lane and a marker at each step.

Format: "Trace Event Format", Google, in its JSON object form: `X` complete events, `M` metadata,
`i` instants; times in microseconds."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synchromesh.runs.profile_ranges import HOST
from synchromesh.runs.shares import waits
from synchromesh.runs.spans import Recording

SHORTEST_US = 5.0  # operators below are left out: in the steps of small models nine tenths of all
STEPS = 0  # the thread of the steps


def chrome_trace(
    recordings: Sequence[Recording], shortest_us: float = SHORTEST_US, **notes: Any
) -> dict[str, Any]:
    """The document of what went on in the steps, with times since the earliest.

    shortest_us: microseconds below which computations are left out, and said so in `otherData`,
    which has `notes` besides. What runs between operators (`host`) is never drawn. Where a rank
    waits for another one, a thread of its own shows it."""
    starts = [s.start for r in recordings for s in r.spans if s.end > r.steps[0][0]]
    origin = min(starts + [start for r in recordings for start, _ in r.steps])
    events: list[dict[str, Any]] = []
    dropped = 0
    for r, waiting in zip(recordings, waits(recordings), strict=True):
        first, last = r.steps[0][0], r.steps[-1][1]
        inside = (s for s in r.spans if s.start < last and s.end > first)
        drawn = [s for s in inside if s.name != HOST]
        kept = [
            s for s in drawn
            if s.kind == "communication" or (s.end - s.start) * 1e6 >= shortest_us
        ]  # fmt: skip
        dropped += len(drawn) - len(kept)
        events += [
            _metadata(r.rank, "process_name", name=f"rank {r.rank}"),
            _metadata(r.rank, "process_sort_index", sort_index=r.rank),
            _thread(r.rank, STEPS, "steps"),
        ]
        lanes = {s.lane: None for s in kept}
        numbers = {lane: n for n, lane in enumerate(lanes, STEPS + 1)}
        events += [_thread(r.rank, n, lane) for lane, n in numbers.items()]
        for number, (start, end) in enumerate(r.steps, 1):
            events.append(
                _complete(r.rank, STEPS, f"step {number}", "step", start - origin, end - start)
            )
            marker = {"ph": "i", "pid": r.rank, "tid": STEPS, "name": f"step {number} begins"}
            events.append({**marker, "ts": _us(start - origin), "s": "p"})
        for s in kept:
            event = _complete(
                r.rank, numbers[s.lane], s.name, s.kind, s.start - origin, s.end - s.start
            )
            if s.ranks:
                event["args"] = {"ranks": list(s.ranks)}
            events.append(event)
        thread = STEPS + 1 + len(numbers)
        events += [_thread(r.rank, thread, "waiting for other ranks")] if waiting else []
        events += [
            _complete(r.rank, thread, "waiting", "waiting", start - origin, end - start)
            for start, end in waiting
        ]
    left_out = {"computations_left_out": dropped, "shorter_than_us": shortest_us}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**notes, **left_out}}


def write_chrome_trace(path: Path, document: dict[str, Any]) -> None:
    """Writes it gzip-compressed, which both viewers open as it is."""
    text = json.dumps(document, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _thread(rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"tid": thread, **_metadata(rank, "thread_name", name=name)}


def _metadata(rank: int, what: str, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "name": what, "args": value}


def _complete(
    rank: int, thread: int, name: str, category: str, start: float, seconds: float
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category,
        "ts": _us(start), "dur": _us(seconds),
    }  # fmt: skip
