"""The figure of a recorded step: what each device did when."""

from collections.abc import Iterator
from typing import Any

from synchromesh.report.drawing import SIZES, Drawing, boxes, fitted
from synchromesh.report.figure import PageFigure, PageTable, Subject
from synchromesh.report.numbers import devices, seconds, short, time_unit
from synchromesh.report.palette import PARTS, Fill
from synchromesh.report.panels import RowPanels
from synchromesh.results.groups import RunGroup
from synchromesh.results.run import RunResult, TimelineSpan, joined

PANELS = RowPanels(row=20, between=12, below=30, ticks=(8, 4), marked=True)
KINDS = {
    "computation": Fill(PARTS["computation"].ink, "", "computation (upper row)"),
    "communication": Fill(PARTS["transfer"].ink, "", "communication"),
    "waiting": Fill(PARTS["waiting"].ink, "", "waiting for slower devices (thin)"),
}
LANES = {"computation": (-0.42, 0.02), "communication": (0.06, 0.42), "waiting": (0.17, 0.31)}


def figures(subject: Subject, most: int = 4, listed: int = 5) -> Iterator[PageFigure]:
    """One, of the quickest strategies, `most` of them, on as many devices as most timelines have;
    the table names the `listed` longest spans of each device."""
    number = subject.comparison.most_devices(_recorded)
    if number is None:
        return
    runs = [run for g, run in subject.known(_recorded) if g.first.devices == number]
    runs.sort(key=_length)
    shown, slower = runs[:most], len(runs[most:])
    yield subject.figure(
        "steps",
        f"A recorded step on {devices(number)}",
        "For each strategy and device a row of computation, and below it communication and "
        "waiting, over the seconds of one step. "
        + " ".join(f"{run.strategy}: {seconds(_length(run))}." for run in shown),
        lambda width: _draw(width, shown),
        PageTable(
            "Seconds of each kind in the recorded step, waiting as a part of communication, "
            "and its longest spans",
            ("strategy", "device", *KINDS, f"the {listed} longest spans"),
            tuple(row for run in shown for row in _rows(run, listed)),
            heads=2,
        ),
        "Recording slows a step down; times elsewhere are of steps without it."
        + (f" The {slower} slower are left out." if slower else ""),
    )


def _recorded(group: RunGroup) -> RunResult | None:
    return next((run for run in group.done if run.timeline), None)


def _length(run: RunResult) -> float:
    return max(span.end for span in run.timeline)


def _by_device(run: RunResult) -> dict[int, list[TimelineSpan]]:
    numbers = sorted({span.device for span in run.timeline})
    return {n: [span for span in run.timeline if span.device == n] for n in numbers}


def _rows(run: RunResult, listed: int) -> Iterator[tuple[str, ...]]:
    for device, spans in _by_device(run).items():
        seen = [joined(((s.start, s.end) for s in spans if s.kind == kind), 0.0) for kind in KINDS]
        sums = (seconds(sum(end - start for start, end in of)) for of in seen)
        longest = sorted(spans, key=lambda s: s.start - s.end)[:listed]
        named = (f"{short(s.name or s.kind, 40)} {seconds(s.end - s.start)}" for s in longest)
        yield run.strategy, str(device), *sums, "; ".join(named)


def _draw(width: int, shown: list[RunResult]) -> Drawing:
    left, longest = 16, max(map(_length, shown)) or 1.0
    runs = [_by_device(run) for run in shown]
    titles = [fitted(run.strategy, SIZES.bold * width) for run in shown]
    counts = list(zip(titles, map(len, runs), strict=True))
    sheet = PANELS.sheet(width, list(KINDS.values()), map(len, runs))
    placed = PANELS.on(sheet, counts, left, width - left - 24, longest, time_unit(longest))
    for (axes, texts), run in zip(placed, runs, strict=True):
        for row, (device, spans) in enumerate(run.items()):
            _device(axes, row, spans, longest / (width - left))
            sheet.text(left - 6, texts[row], str(device), "muted", ha="right")
    return sheet


def _device(axes: Any, row: int, spans: list[TimelineSpan], pixel: float) -> None:
    for kind, fill in KINDS.items():
        low, high = (row + LANES[kind][0], row + LANES[kind][1])
        pieces = joined(((s.start, s.end) for s in spans if s.kind == kind), pixel / 2)
        boxes(axes, fill, [(a, max(b, a + pixel / 2), low, high) for a, b in pieces])
