"""The figure of a recorded step: what each device did when."""

from collections.abc import Iterable
from typing import Any

from synchromesh.report.drawing import BOLD, LINE, Drawing, boxes, fitted, legend_height
from synchromesh.report.figure import PageFigure, PageTable
from synchromesh.report.numbers import devices, seconds, short
from synchromesh.report.palette import PARTS, Fill
from synchromesh.report.subject import Subject
from synchromesh.results.run import RunResult, TimelineSpan

SHOWN = 4  # strategies
ROW = 20  # pixels of a device
LISTED = 5  # spans of a device in the table, the longest
KINDS = {
    "computation": Fill(PARTS["computation"].ink, "", "computation (upper row)"),
    "communication": Fill(PARTS["transfer"].ink, "", "communication"),
    "waiting": Fill(PARTS["waiting"].ink, "", "waiting for slower devices (thin)"),
}
LANES = {"computation": (-0.42, 0.02), "communication": (0.06, 0.42), "waiting": (0.17, 0.31)}


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One, of the quickest strategies on as many devices as most timelines have."""
    comparison = subject.comparison
    number = comparison.most_devices(lambda g: any(run.timeline for run in g.done))
    if number is None:
        return ()
    found = [
        r for g in comparison.on(number) if (r := next((r for r in g.done if r.timeline), None))
    ]
    found.sort(key=_length)
    shown = found[:SHOWN]
    return (
        subject.figure(
            "steps",
            f"A recorded step on {devices(number)}",
            "For each strategy and device a row of computation, and below it communication and "
            "waiting, over the seconds of one step. "
            + " ".join(f"{run.strategy}: {seconds(_length(run))}." for run in shown),
            lambda width: _draw(width, shown),
            PageTable(
                "Seconds of each kind in the recorded step, waiting as a part of communication, "
                "and its longest spans",
                ("strategy", "device", *KINDS, f"the {LISTED} longest spans"),
                tuple(row for run in shown for row in _rows(run)),
                heads=2,
            ),
            "Recording slows a step down; times elsewhere are of steps without it."
            + (f" The {len(found) - SHOWN} slower are left out." if len(found) > SHOWN else ""),
        ),
    )  # fmt: skip


def _length(run: RunResult) -> float:
    return max(span.end for span in run.timeline)


def _rows(run: RunResult) -> list[tuple[str, ...]]:
    rows = []
    for device in sorted({span.device for span in run.timeline}):
        spans = [span for span in run.timeline if span.device == device]
        sums = [
            sum(end - start for start, end in merged((s for s in spans if s.kind == kind), 0.0))
            for kind in KINDS
        ]
        longest = sorted(spans, key=lambda s: s.start - s.end)[:LISTED]
        said = "; ".join(
            f"{short(s.name or s.kind, 40)} {seconds(s.end - s.start)}" for s in longest
        )
        rows.append((run.strategy, str(device), *map(seconds, sums), said))
    return rows


def merged(spans: Iterable[TimelineSpan], least: float) -> list[tuple[float, float]]:
    """(start, end) of spans as they would be seen: without gaps shorter than `least` seconds."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start - found[-1][1] < least:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.start, span.end))
    return found


def _draw(width: int, shown: list[RunResult]) -> Drawing:
    fills = list(KINDS.values())
    top, left = legend_height(fills, width) + 8, 16
    counts = [len({span.device for span in run.timeline}) for run in shown]
    heights = [LINE + 12 + ROW * count for count in counts]
    sheet = Drawing(width, top + sum(heights) + 30)
    sheet.legend(fills, 0)
    longest = max(map(_length, shown)) or 1.0
    for i, (run, height) in enumerate(zip(shown, heights, strict=True)):
        last = i == len(shown) - 1
        sheet.text(0, top + 12, fitted(run.strategy, BOLD * width), fontweight="bold")
        inner = height - LINE - 12
        axes = sheet.axes(left, top + LINE + 2, width - left - 24, inner)
        named = sorted({span.device for span in run.timeline})
        for row, device in enumerate(named):
            spans = [span for span in run.timeline if span.device == device]
            _device(axes, row, spans, longest / (width - left))
            sheet.text(left - 6, top + LINE + 2 + inner * (row + 0.5) / len(named) + 4,
                       str(device), "muted", ha="right")  # fmt: skip
        axes.set(xlim=(0, longest), ylim=(len(named) - 0.5, -0.5), yticks=[])
        axes.grid(True, axis="x")
        axes.locator_params(axis="x", nbins=4 if sheet.narrow else 8)
        ticks = [tick for tick in axes.get_xticks() if 0 <= tick <= longest]
        axes.set_xticks(ticks, [seconds(tick) if last else "" for tick in ticks])
        top += height
    return sheet


def _device(axes: Any, row: int, spans: list[TimelineSpan], pixel: float) -> None:
    """Computation in the upper half of the row, communication and waiting in the lower."""
    for kind, fill in KINDS.items():
        low, high = (row + LANES[kind][0], row + LANES[kind][1])
        pieces = merged((s for s in spans if s.kind == kind), pixel / 2)
        boxes(axes, fill, [(a, max(b, a + pixel / 2), low, high) for a, b in pieces])
