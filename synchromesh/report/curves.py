"""The figures of metrics: accuracy and others against epochs and against seconds."""

from synchromesh.report.drawing import LINE, Drawing
from synchromesh.report.figure import PageFigure
from synchromesh.report.lines import legend, legend_rows, style
from synchromesh.report.numbers import devices, metric, seconds, spread
from synchromesh.report.subject import Subject
from synchromesh.results.groups import MetricPoint

MARKED = 12  # points of a line at most that get a marker
HEIGHT = 280  # pixels


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One for each metric, of the number of devices on which most strategies were evaluated."""
    return tuple(
        figure
        for i, name in enumerate(subject.comparison.metrics)
        if (figure := _figure(subject, name, f"metric-{i}"))
    )


def _figure(subject: Subject, name: str, kind: str) -> PageFigure | None:
    number = subject.comparison.most_devices(lambda group: group.curve(name))
    if number is None:
        return None
    curves = [(g, c) for g in subject.comparison.groups if (c := g.curve(name))]
    shown = {g.first.strategy: c for g, c in curves if g.first.devices == number}
    for group, curve in curves:  # what ran on one device alone
        if group.first.devices == 1:
            shown.setdefault(group.first.strategy, curve)
    ends = {strategy: curve[-1].spread.mean for strategy, curve in shown.items()}
    seeds = max(len(group.done) for group, _ in curves)
    noun = name.capitalize()
    return subject.figure(
        kind,
        f"{noun} on {devices(number)}",
        f"Lines of {name} against epochs and against seconds of training, one for each strategy. "
        f"At the end they lie between {metric(min(ends.values()))} and "
        f"{metric(max(ends.values()))}.",
        lambda width: _draw(width, subject, name, shown),
        subject.table(
            f"{noun} at the end of training, on any number of devices",
            ("epochs", name, "seconds of training", "seeds"),
            ((group, _cells(curve[-1])) for group, curve in curves),
        ),
        (f"Mean of {seeds} seeds; bands are one standard deviation. " if seeds > 1 else "")
        + "Seconds are of training, without validation and checkpoints.",
    )


def _cells(end: MetricPoint) -> tuple[str, ...]:
    return str(end.epoch), spread(end.spread), seconds(end.seconds), str(end.spread.count)


def _draw(
    width: int, subject: Subject, name: str, shown: dict[str, tuple[MetricPoint, ...]]
) -> Drawing:
    stacked = Drawing(width, 1).narrow
    rows = legend_rows(list(shown), width)
    sheet = Drawing(width, (2 * HEIGHT if stacked else HEIGHT) + LINE * rows + 12)
    top = legend(sheet, subject.marks, list(shown), 0) + 8
    left, tall = 48, HEIGHT - LINE - 44
    if stacked:
        wide = float(width - left - 14)
        places = [(float(left), top + LINE + 8), (float(left), top + HEIGHT + LINE + 8)]
    else:
        wide = (width - 2 * left - 38) / 2
        places = [(float(left), top + LINE + 8), (2 * left + 24 + wide, top + LINE + 8)]
    lowest = min(p.spread.mean for curve in shown.values() for p in curve)
    for i, (x, y) in enumerate(places):
        axes = sheet.axes(x, y, wide, tall)
        for strategy, curve in shown.items():
            mark, across = subject.marks[strategy], [p.seconds if i else p.epoch for p in curve]
            means = [p.spread.mean for p in curve]
            low = [p.spread.mean - p.spread.deviation for p in curve]
            high = [p.spread.mean + p.spread.deviation for p in curve]
            axes.fill_between(across, low, high, color=mark.ink.paint, alpha=0.15, linewidth=0)
            every = max(-(-len(curve) // MARKED), 1)
            axes.plot(across, means, **style(mark), markevery=every)
        axes.grid(True)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of training" if i else "epochs")
        if lowest >= 0:
            axes.set_ylim(bottom=max(axes.get_ylim()[0], 0))
        axes.locator_params(axis="x", nbins=5)
        sheet.text(x - left, y - 12, name, "muted")
    return sheet
