"""The timeline of one recorded step, as a picture has it: a few spans of each device."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from synchromesh.results.run import TimelineSpan
from synchromesh.runs.intervals import Interval, Intervals, common, union
from synchromesh.runs.shares import waits
from synchromesh.runs.spans import Recording

# Parts of the step: shorter pauses between computations are not seen, nor shorter spans.
FINEST = 1 / 500


def timeline(recordings: Sequence[Recording]) -> tuple[TimelineSpan, ...]:
    """The last recorded step of every rank, from the first of its beginnings on. When a rank
    waits for another one, this is a span beside the communication that it waits in."""
    origin = min(r.steps[-1][0] for r in recordings)
    finest = FINEST * max(end - start for r in recordings for start, end in r.steps[-1:])
    found = []
    for recording, waiting in zip(recordings, waits(recordings), strict=True):
        for span in _spans(recording, waiting, finest):
            found.append(replace(span, start=span.start - origin, end=span.end - origin))
    return tuple(found)


def _spans(recording: Recording, waiting: Intervals, finest: float) -> Iterator[TimelineSpan]:
    """Of one rank, by the recording's clock."""
    rank, step = recording.rank, recording.steps[-1]
    spans = [s for s in recording.spans if s.start < step[1] and s.end > step[0]]
    busy = union((s.start, s.end) for s in spans if s.kind == "computation")
    for start, end in _joined(common(busy, union([step])), finest):
        yield TimelineSpan(rank, start, end, "computation")
    for s in spans:
        start, end = max(s.start, step[0]), min(s.end, step[1])
        if s.kind == "communication" and end - start >= finest:
            yield TimelineSpan(rank, start, end, "communication", s.name)
    for start, end in _joined(common(waiting, union([step])), finest):
        yield TimelineSpan(rank, start, end, "waiting")


def _joined(intervals: Sequence[Interval], finest: float) -> list[Interval]:
    """Those that are seen, neighbours that are seen as one joined."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start - found[-1][1] < finest:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return [(start, end) for start, end in found if end - start >= finest]
