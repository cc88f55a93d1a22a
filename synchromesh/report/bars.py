"""Horizontal bars of strategies, in a panel for each number of devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synchromesh.report.drawing import (
    LINE,
    SMALL,
    Box,
    Drawing,
    boxes,
    labels,
    legend_height,
    lines,
    marker,
    round_numbers,
    width_of,
)
from synchromesh.report.palette import INKS, Fill, StrategyMark

ROW = 24  # pixels


@dataclass(frozen=True)
class Bar:
    """The parts of a bar from its left end on, its label; whiskers and a tick where it has any."""

    strategy: str
    parts: tuple[tuple[Fill, float], ...]
    label: str
    whiskers: tuple[float, float] | None = None
    tick: float | None = None

    @property
    def length(self) -> float:
        return sum(value for _, value in self.parts)


@dataclass(frozen=True)
class Panel:
    """Bars under one title."""

    title: str
    bars: tuple[Bar, ...]


def bars(
    width: int,
    panels: Sequence[Panel],
    legend: Sequence[Fill],
    number: Callable[[float], str],
    marks: Mapping[str, StrategyMark],
) -> Drawing:
    """The picture; `number` writes values of the axis below."""
    names = list(dict.fromkeys(bar.strategy for panel in panels for bar in panel.bars))
    name_width = min(max(map(width_of, names)), 0.30 * width) + 6
    short = labels(names, name_width - 6)
    left, top = name_width + 18, legend_height(legend, width) + (8 if legend else 0)
    label_width = max(width_of(bar.label) for panel in panels for bar in panel.bars) + 12
    inner = width - left - label_width
    longest = max(
        max(bar.length, bar.tick or 0.0, *(bar.whiskers or (0.0,)))
        for panel in panels
        for bar in panel.bars
    )
    heights = [LINE + 8 + ROW * len(panel.bars) for panel in panels]
    sheet = Drawing(width, top + sum(heights) + 12 * (len(panels) - 1) + 30)
    sheet.legend(legend, 0)
    for i, (panel, height) in enumerate(zip(panels, heights, strict=True)):
        sheet.text(0, top + 12, panel.title, fontsize=SMALL + 1, fontweight="bold")
        axes = sheet.axes(left, top + LINE + 2, inner, height - LINE - 8)
        _panel(axes, panel, longest or 1.0, marks)
        for j, bar in enumerate(panel.bars):
            y = top + LINE + 2 + (height - LINE - 8) * (j + 0.5) / len(panel.bars) + 4
            sheet.text(name_width, y, short[bar.strategy], ha="right")
            end = max(bar.length, *(bar.whiskers or (0.0,)), bar.tick or 0.0)
            sheet.text(left + inner * end / (longest or 1.0) + 7, y, bar.label, "muted")
        last = i == len(panels) - 1
        axes.tick_params(labelbottom=last, bottom=last)
        ticks = round_numbers(longest or 1.0, 3 if sheet.narrow else 5)
        axes.set_xticks(ticks, [number(tick) for tick in ticks] if last else ["" for _ in ticks])
        top += height + 12
    return sheet


def _panel(axes: Any, panel: Panel, longest: float, marks: Mapping[str, StrategyMark]) -> None:
    count = len(panel.bars)
    axes.set(xlim=(0, longest), ylim=(count - 0.5, -0.5), yticks=[])
    axes.grid(True, axis="x")
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(INKS["muted"].paint)
    pieces: dict[Fill, list[Box]] = {}
    ends: list[Box] = []
    ticks: list[Box] = []
    for y, bar in enumerate(panel.bars):
        start = 0.0
        for fill, value in bar.parts:
            pieces.setdefault(fill, []).append((start, start + value, y - 0.31, y + 0.31))
            start += value
        if bar.whiskers:
            ends.append((*bar.whiskers, y, y))
            ends += [(end, end, y - 0.14, y + 0.14) for end in bar.whiskers]
        if bar.tick is not None:
            ticks.append((bar.tick, bar.tick, y - 0.42, y + 0.42))
        mark = marks.get(bar.strategy)
        if mark:
            axes.plot(
                -9 * longest / axes.get_window_extent().width, y, mark.marker, clip_on=False,
                **marker(mark),
            )  # fmt: skip

    for fill, places in pieces.items():
        boxes(axes, fill, places)
    lines(axes, ends, linewidth=1.2)
    lines(axes, ticks, linewidth=2)
