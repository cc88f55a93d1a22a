"""The figure of predicted beside measured step times."""

from collections.abc import Iterator

from synchromesh.report.drawing import SIZES, Drawing, marker
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.lines import below_legend
from synchromesh.report.memory import peak
from synchromesh.report.numbers import plain, seconds, share, size, time_unit
from synchromesh.report.palette import INKS
from synchromesh.report.panels import log_ticks
from synchromesh.results.groups import RunGroup

Times = tuple[float, float]  # predicted and measured, of a step


def figures(subject: Subject) -> Iterator[PageFigure]:
    """One; none where nothing was predicted, or all was."""
    times = subject.known(_times)
    if not times or subject.comparison.predicted:
        return
    errors = [abs(predicted / measured - 1) for _, (predicted, measured) in times]
    mean = sum(errors) / len(errors)
    yield subject.figure(
        "predicted",
        "Predicted and measured step time",
        f"Points of predicted against measured step time of {len(times)} plans, with the line "
        f"on which both are equal. The mean absolute error is {share(mean)}.",
        lambda width: _draw(width, subject, times),
        subject.table(
            "Step time and peak memory, predicted before the first step and measured",
            ("predicted", "measured", "predicted / measured", "memory predicted",
             "memory measured"),
            ((group, _cells(group, *pair)) for group, pair in times),
        ),
        f"Mean absolute error {share(mean)}. On the line both are equal.",
    )  # fmt: skip


def _cells(group: RunGroup, predicted: float, measured: float) -> tuple[str, ...]:
    memory = (group.median(lambda run: run.predicted_peak_bytes), group.median(peak))
    times = (seconds(predicted), seconds(measured), plain(predicted / measured))
    return (*times, *map(size, memory))


def _times(group: RunGroup) -> Times | None:
    predicted, step = group.median(lambda run: run.predicted_step_seconds), group.step_seconds
    if predicted is None or step is None or min(predicted, step.median) <= 0:
        return None
    return predicted, step.median


def _draw(width: int, subject: Subject, times: list[tuple[RunGroup, Times]]) -> Drawing:
    names = list(dict.fromkeys(group.first.strategy for group, _ in times))
    side = min(width - 66 - 30, 380)
    sheet, top = below_legend(width, side + SIZES.line + 52, subject.marks, names)
    axes = sheet.axes(66, top + SIZES.line + 8, width - 66 - 30, side)
    values = [value for _, pair in times for value in pair]
    ends = min(values) / 1.3, max(values) * 1.3
    axes.plot(ends, ends, color=INKS["muted"].paint, linewidth=1.2)
    for group, (predicted, measured) in times:
        mark = subject.marks[group.first.strategy]
        axes.plot(predicted, measured, linestyle="", marker=mark.marker, **marker(mark))
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ticks = log_ticks(*ends, 4 if sheet.narrow else 6, time_unit(*values))
    axes.set_xticks(*ticks)
    axes.set_yticks(*ticks)
    axes.minorticks_off()
    axes.grid(True)
    axes.set_xlabel("predicted")
    sheet.text(0, top + 12, "measured", "muted")
    return sheet
