"""The figure of T_1/N + T_comm against N: a panel for each strategy.

T_N = T_1 / N + T_comm      [results/breakdown.py has the equations of the parts]"""

from typing import Any

from synchromesh.report.drawing import Drawing, Grid, lines, small_multiples, stacked
from synchromesh.report.figure import PageFigure
from synchromesh.report.numbers import seconds
from synchromesh.report.palette import PARTS, Fill
from synchromesh.report.subject import Subject
from synchromesh.results.breakdown import Overhead, overhead
from synchromesh.results.groups import RunGroup

IDEAL = Fill(PARTS["computation"].ink, "", "T₁/N: one device's step, divided")
LEGEND = (IDEAL, PARTS["transfer"], PARTS["waiting"], PARTS["other"])
GRID = Grid(left=46, tall=150, below=38)


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
        subject.figure(
            "scaling",
            "T₁/N + T_comm against N devices",
            "A panel for each strategy, in it a bar for each number of devices: one device's "
            "step time divided by N, and above it exposed transfer, waiting and other. T_comm "
            f"is the largest part of a step with {group.first.strategy} on "
            f"{group.first.devices} devices: {seconds(most.total)} of {seconds(most.step)}.",
            lambda width: _draw(width, known),
            subject.table(
                "Step time as T₁/N + T_comm, and the parts of T_comm",
                ("step", "T₁/N", "T_comm", "exposed transfer", "waiting", "other"),
                ((g, _cells(parts)) for g, parts in known),
            ),
            "T_comm = T_N − T₁/N. Other is computation beyond T₁/N and overhead; where it is "
            "negative, N devices compute in less than T₁/N, and the bar of T₁/N is cut at the "
            "line that marks it.",
        ),
    )  # fmt: skip


def _cells(parts: Overhead) -> tuple[str, ...]:
    times = (parts.step, parts.ideal, parts.total, parts.transfer, parts.waiting, parts.other)
    return tuple(map(seconds, times))


def _draw(width: int, known: list[tuple[RunGroup, Overhead]]) -> Drawing:
    panels: dict[str, list[tuple[int, Overhead]]] = {}
    for group, parts in known:
        panels.setdefault(group.first.strategy, []).append((group.first.devices, parts))
    numbers = sorted({n for bars in panels.values() for n, _ in bars})
    sheet, places = small_multiples(width, LEGEND, list(panels), "N devices", GRID)
    most = max(max(parts.step, parts.ideal) for _, parts in known) * 1.05
    for (axes, first), found in zip(places, panels.values(), strict=True):
        _bars(axes, [(numbers.index(n), parts) for n, parts in found])
        axes.set(xlim=(-0.6, len(numbers) - 0.4), ylim=(0, most))
        axes.set_xticks(range(len(numbers)), [str(n) for n in numbers])
        axes.grid(True, axis="y")
        ticks = [t for t in axes.get_yticks() if 0 <= t <= most]
        axes.set_yticks(ticks, [seconds(t) if first else "" for t in ticks])
    return sheet


def _bars(axes: Any, found: list[tuple[int, Overhead]]) -> None:
    bars = []
    for x, parts in found:
        start = min(parts.ideal, parts.step - parts.transfer - parts.waiting)
        values = (start, parts.transfer, parts.waiting, parts.other)
        bars.append((x, dict(zip(LEGEND, values, strict=True))))
    stacked(axes, bars, 0.33)
    lines(axes, [(x - 0.42, x + 0.42, p.ideal, p.ideal) for x, p in found], linewidth=1.5)
