"""The figure of predicted beside measured step times."""

from math import exp, log

from synchromesh.report.drawing import LINE, Drawing, marker
from synchromesh.report.figure import PageFigure
from synchromesh.report.lines import legend, legend_rows
from synchromesh.report.memory import peak
from synchromesh.report.numbers import plain, seconds, share, size
from synchromesh.report.palette import INKS
from synchromesh.report.subject import Subject
from synchromesh.results.groups import RunGroup


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where nothing was predicted, or all was."""
    known = [(g, *pair) for g in subject.comparison.groups if (pair := _times(g))]
    if not known or subject.comparison.predicted:
        return ()
    errors = [abs(predicted / measured - 1) for _, predicted, measured in known]
    mean = sum(errors) / len(errors)
    return (
        subject.figure(
            "predicted",
            "Predicted and measured step time",
            f"Points of predicted against measured step time of {len(known)} plans, with the line "
            f"on which both are equal. The mean absolute error is {share(mean)}.",
            lambda width: _draw(width, subject, known),
            subject.table(
                "Step time and peak memory, predicted before the first step and measured",
                ("predicted", "measured", "predicted / measured", "memory predicted",
                 "memory measured"),
                ((g, (seconds(p), seconds(m), plain(p / m),
                      size(g.median(lambda r: r.predicted_peak_bytes)), size(g.median(peak))))
                 for g, p, m in known),
            ),
            f"Mean absolute error {share(mean)}. On the line both are equal.",
        ),
    )  # fmt: skip


def _times(group: RunGroup) -> tuple[float, float] | None:
    predicted, step = group.median(lambda run: run.predicted_step_seconds), group.step_seconds
    if predicted is None or step is None or min(predicted, step.median) <= 0:
        return None
    return predicted, step.median


def _draw(width: int, subject: Subject, known: list[tuple[RunGroup, float, float]]) -> Drawing:
    names = list(dict.fromkeys(group.first.strategy for group, _, _ in known))
    side = min(width - 58 - 14, 380)
    sheet = Drawing(width, side + LINE * (1 + legend_rows(names, width)) + 60)
    top = legend(sheet, subject.marks, names, 0) + 8
    axes = sheet.axes(58, top + LINE + 8, side, side)
    values = [value for _, *pair in known for value in pair]
    ends = min(values) / 1.3, max(values) * 1.3
    axes.plot(ends, ends, color=INKS["muted"].paint, linewidth=1.2)
    for group, predicted, measured in known:
        mark = subject.marks[group.first.strategy]
        axes.plot(predicted, measured, linestyle="", marker=mark.marker, **marker(mark))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = _ticks(*ends, count=4 if sheet.narrow else 6)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [seconds(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(True)
    axes.set_xlabel("predicted")
    sheet.text(0, top + 12, "measured", "muted")
    return sheet


def _ticks(least: float, most: float, count: int) -> list[float]:
    """Round numbers on a logarithmic axis."""
    found = [
        digit * 10.0**power
        for power in range(-9, 9)
        for digit in (1, 2, 5)
        if least <= digit * 10.0**power <= most
    ]
    if not found:
        middle = exp((log(least) + log(most)) / 2)
        return [float(f"{middle:.1g}")]
    return found[:: -(-len(found) // count)]
