"""The figure of T_1/N + T_comm against N: a panel for each strategy.

T_N = T_1 / N + T_comm      [results/breakdown.py has the equations of the parts]
"""

from typing import Any

from synchromesh.report.drawing import (
    BOLD,
    LINE,
    Drawing,
    drawn,
    fitted,
    legend_height,
    lines,
    stacked,
)
from synchromesh.report.figure import PageFigure, PageTable
from synchromesh.report.numbers import seconds
from synchromesh.report.palette import PARTS, Fill
from synchromesh.report.subject import Subject
from synchromesh.results.breakdown import Overhead, overhead
from synchromesh.results.groups import RunGroup

IDEAL = Fill(PARTS["computation"].ink, "", "T₁/N: one device's step, divided")
LEGEND = (IDEAL, PARTS["transfer"], PARTS["waiting"], PARTS["other"])
TALL = 150  # pixels of a panel


def figures(subject: Subject) -> tuple[PageFigure, ...]:
    """One; none where nothing ran on one device, or nothing on several."""
    comparison = subject.comparison
    found = [
        (g, parts)
        for g in comparison.groups
        if (parts := overhead(g, comparison.one_device, comparison.weak))
    ]
    known = [(g, parts) for g, parts in found if g.first.devices > 1]
    if not known:
        return ()
    group, most = max(known, key=lambda pair: pair[1].total / pair[1].step)
    return (
        PageFigure(
            f"{subject.name}-scaling",
            subject.title("T₁/N + T_comm against N devices"),
            "A panel for each strategy, in it a bar for each number of devices: one device's "
            "step time divided by N, and above it exposed transfer, waiting and other. T_comm "
            f"is the largest part of a step with {group.first.strategy} on "
            f"{group.first.devices} devices: {seconds(most.total)} of {seconds(most.step)}.",
            drawn(f"{subject.name}-scaling", lambda width: _draw(width, subject, known)),
            PageTable(
                "Step time as T₁/N + T_comm, and the parts of T_comm",
                ("strategy", "devices", "step", "T₁/N", "T_comm", "exposed transfer", "waiting",
                 "other"),
                tuple((*subject.places(g), *_cells(parts)) for g, parts in known),
                heads=2,
            ),
            "T_comm = T_N − T₁/N. Other is computation beyond T₁/N and overhead; where it is "
            "negative, N devices compute in less than T₁/N, and the bar of T₁/N is cut at the "
            "line that marks it.",
        ),
    )  # fmt: skip


def _cells(parts: Overhead) -> tuple[str, ...]:
    times = (parts.step, parts.ideal, parts.total, parts.transfer, parts.waiting, parts.other)
    return tuple(map(seconds, times))


def _draw(width: int, subject: Subject, known: list[tuple[RunGroup, Overhead]]) -> Drawing:
    panels: dict[str, list[tuple[int, Overhead]]] = {}
    for group, parts in known:
        panels.setdefault(group.first.strategy, []).append((group.first.devices, parts))
    numbers = sorted({n for bars in panels.values() for n, _ in bars})
    across = 2 if Drawing(width, 1).narrow else 4
    top = legend_height(LEGEND, width) + 8
    left, gap = 46, 14
    wide = (width - left - gap * (across - 1)) / across
    rows = -(-len(panels) // across)
    tall = TALL + LINE + 38
    sheet = Drawing(width, top + rows * tall)
    sheet.legend(LEGEND, 0)
    most = max(max(parts.step, parts.ideal) for _, parts in known) * 1.05
    for i, (strategy, found) in enumerate(panels.items()):
        x, y = left + (i % across) * (wide + gap), top + (i // across) * tall
        axes = sheet.axes(x, y + LINE + 2, wide, TALL)
        _bars(axes, [(numbers.index(n), parts) for n, parts in found])
        axes.set(xlim=(-0.6, len(numbers) - 0.4), ylim=(0, most))
        axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])
        axes.grid(True, axis="y")
        ticks = [t for t in axes.get_yticks() if 0 <= t <= most]
        axes.set_yticks(ticks, [seconds(t) if i % across == 0 else "" for t in ticks])
        sheet.text(x, y + 12, fitted(strategy, BOLD * wide), fontweight="bold")
        if i >= len(panels) - across:
            axes.set_xlabel("N devices", labelpad=1)
    return sheet


def _bars(axes: Any, found: list[tuple[int, Overhead]]) -> None:
    bars = []
    for x, parts in found:
        start = min(parts.ideal, parts.step - parts.transfer - parts.waiting)
        values = (start, parts.transfer, parts.waiting, parts.other)
        bars.append((x, dict(zip(LEGEND, values, strict=True))))
    stacked(axes, bars, 0.33)
    lines(axes, [(x - 0.42, x + 0.42, p.ideal, p.ideal) for x, p in found], linewidth=1.5)
