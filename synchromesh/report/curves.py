"""The figures of metrics: accuracy and others against epochs and against seconds."""

from collections.abc import Iterator, Mapping
from typing import Any

from synchromesh.report.drawing import SIZES, Drawing
from synchromesh.report.figure import PageFigure, Subject
from synchromesh.report.lines import below_legend, style
from synchromesh.report.numbers import NUMBER, devices, metric, seconds, spread, time_unit
from synchromesh.report.palette import StrategyMark
from synchromesh.report.panels import round_ticks
from synchromesh.results.groups import MetricPoint

Curve = tuple[MetricPoint, ...]


def figures(subject: Subject) -> Iterator[PageFigure]:
    for i, name in enumerate(subject.comparison.metrics):
        yield from _figure(subject, name, f"metric-{i}")


def _figure(subject: Subject, name: str, kind: str) -> Iterator[PageFigure]:
    number = subject.comparison.most_devices(lambda group: group.curve(name))
    if number is None:
        return
    curves = subject.known(lambda group: group.curve(name) or None)
    shown = {g.first.strategy: c for g, c in curves if g.first.devices == number}
    for group, curve in curves:
        if group.first.devices == 1:  # what ran on one device alone
            shown.setdefault(group.first.strategy, curve)
    ends = [curve[-1].spread.mean for curve in shown.values()]
    seeds = max(point.spread.count for curve in shown.values() for point in curve)
    noun = name.capitalize()
    yield subject.figure(
        kind,
        f"{noun} on {devices(number)}",
        f"Lines of {name} against epochs and against time of training, one for each strategy. "
        f"At the end they lie between {metric(min(ends))} and {metric(max(ends))}.",
        lambda width: _draw(width, name, shown, subject.marks),
        subject.table(
            f"{noun} at the end of training, on any number of devices",
            ("epochs", name, "time of training", "seeds"),
            ((group, _cells(curve[-1])) for group, curve in curves),
        ),
        (f"Mean of {seeds} seeds; bands are one standard deviation. " if seeds > 1 else "")
        + "Times are of training, without validation and checkpoints.",
    )


def _cells(end: MetricPoint) -> tuple[str, ...]:
    return str(end.epoch), spread(end.spread), seconds(end.seconds), str(end.spread.count)


def _draw(
    width: int, name: str, shown: Mapping[str, Curve], marks: Mapping[str, StrategyMark],
    height: int = 280,
) -> Drawing:  # fmt: skip
    """Two pictures `height` pixels tall: side by side, or one below the other on narrow sheets."""
    narrow, left = width < SIZES.wide, 48
    sheet, top = below_legend(width, (2 if narrow else 1) * height + 4, marks, list(shown))
    wide = width - left - 14 if narrow else (width - 2 * left - 38) / 2
    right, below = (left, height) if narrow else (2 * left + 24 + wide, 0)
    lowest = min(point.spread.mean for curve in shown.values() for point in curve)
    for against, x, y in (("epochs", left, top), ("time of training", right, top + below)):
        axes = sheet.axes(x, y + SIZES.line + 8, wide, height - SIZES.line - 44)
        for strategy, curve in shown.items():
            across = [p.epoch if against == "epochs" else p.seconds for p in curve]
            _line(axes, across, curve, marks[strategy])
        end = axes.get_xlim()[1]
        axes.set_xticks(*round_ticks(end, 5, NUMBER if against == "epochs" else time_unit(end)))
        axes.grid(True)
        axes.set(xlim=(0, None), xlabel=against)
        if lowest >= 0:
            axes.set_ylim(bottom=max(axes.get_ylim()[0], 0))
        sheet.text(x - left, y + SIZES.line - 4, name, "muted")
    return sheet


def _line(axes: Any, xs: list[float], curve: Curve, mark: StrategyMark, most: int = 12) -> None:
    """Means and a band of a deviation; at most so many points get a marker."""
    spreads = [point.spread for point in curve]
    means = [spread.mean for spread in spreads]
    low, high = ([s.mean + sign * s.deviation for s in spreads] for sign in (-1, 1))
    axes.fill_between(xs, low, high, color=mark.ink.paint, alpha=0.15, linewidth=0)
    axes.plot(xs, means, **style(mark), markevery=max(-(-len(curve) // most), 1))
