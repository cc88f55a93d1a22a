"""The timeline of one recorded step, as a picture has it: a few spans of each device."""

from collections.abc import Sequence

from synchromesh.recording.intervals import Interval, common, union
from synchromesh.recording.spans import Recording
from synchromesh.results.run import TimelineSpan

# Parts of the step: shorter pauses between computations are not seen, nor shorter spans.
FINEST = 1 / 500


def timeline(recordings: Sequence[Recording]) -> tuple[TimelineSpan, ...]:
    """The last recorded step of every rank, from the first of its beginnings on."""
    steps = [r.steps[-1] for r in recordings]
    origin = min(start for start, _ in steps)
    finest = FINEST * max(end - start for start, end in steps)
    found: list[TimelineSpan] = []
    for recording, step in zip(recordings, steps, strict=True):
        spans = [s for s in recording.spans if s.start < step[1] and s.end > step[0]]
        busy = [(s.start, s.end) for s in spans if s.kind == "computation"]
        for start, end in _joined(common(union(busy), union([step])), finest):
            found.append(TimelineSpan(recording.rank, start - origin, end - origin, "computation"))
        for s in spans:
            start, end = max(s.start, step[0]), min(s.end, step[1])
            if s.kind == "communication" and end - start >= finest:
                found.append(
                    TimelineSpan(
                        recording.rank, start - origin, end - origin, "communication", s.name
                    )
                )
    return tuple(found)


def _joined(intervals: Sequence[Interval], finest: float) -> list[Interval]:
    """Those that are seen, neighbours that are seen as one joined."""
    found: list[Interval] = []
    for start, end in intervals:
        if found and start - found[-1][1] < finest:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return [(start, end) for start, end in found if end - start >= finest]
