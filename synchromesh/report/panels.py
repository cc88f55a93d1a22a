"""Panels of bars: rows of horizontal bars below one another, columns of stacked ones beside."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synchromesh.report import drawing
from synchromesh.report.drawing import SIZES, Box, Drawing
from synchromesh.report.numbers import Unit, devices, time_unit
from synchromesh.report.palette import INKS, Fill, StrategyMark
from synchromesh.results.groups import RunGroup

Stack = tuple[float, Iterable[tuple[Fill, float]]]  # its place, its parts from 0 on


@dataclass(frozen=True)
class RowPanels:
    """Panels below one another under a title each, whose rows lie along one axis of seconds from
    0, which is named below the last one; pixels.

    row: of a row. between: the rows of a panel and the next title. below: the last panel. title:
    of letters. ticks: about how many, on wide and on narrow sheets. marked: at each panel."""

    row: int
    between: int
    below: int
    ticks: tuple[int, int]
    marked: bool
    title: float = SIZES.small

    def sheet(self, width: int, fills: Sequence[Fill], counts: Iterable[int]) -> Drawing:
        """For panels of so many rows each, below a legend."""
        tall = sum(SIZES.line + self.between + self.row * count for count in counts)
        return Drawing(width, tall + self.below, fills)

    def on(
        self, sheet: Drawing, panels: Sequence[tuple[str, int]], left: float, width: float,
        longest: float, unit: Unit,
    ) -> Iterator[tuple[Any, list[float]]]:  # fmt: skip
        """Of each panel (title, rows) its axes up to `longest`, and its rows' base lines."""
        top, (ticks, texts) = sheet.top, round_ticks(longest, self.ticks[sheet.narrow], unit)
        for i, (title, count) in enumerate(panels, 1):
            sheet.text(0, top + 12, title, fontsize=self.title, fontweight="bold")
            first, tall, last = top + SIZES.line + 2, self.row * count, i == len(panels)
            axes = sheet.axes(left, first, width, tall)
            axes.set(xlim=(0, longest), ylim=(count - 0.5, -0.5), yticks=[])
            axes.set_xticks(ticks, texts if last else [""] * len(ticks))
            axes.tick_params(labelbottom=last, bottom=last or self.marked)
            axes.grid(True, axis="x")
            yield axes, [first + tall * (row + 0.5) / count + 4 for row in range(count)]
            top += SIZES.line + self.between + tall


@dataclass(frozen=True)
class Bar:
    """The parts of a bar from its left end on, what it is labelled with; whiskers if any."""

    strategy: str
    parts: tuple[tuple[Fill, float], ...]
    seconds: float
    whiskers: tuple[float, float] | None = None

    @property
    def end(self) -> float:
        return max(sum(value for _, value in self.parts), *(self.whiskers or (0.0,)))


BARS = RowPanels(row=24, between=20, below=18, ticks=(5, 3), marked=False, title=SIZES.small + 1)


def bars(
    width: int, of_groups: Sequence[tuple[RunGroup, Bar]], fills: Sequence[Fill],
    marks: Mapping[str, StrategyMark],
) -> Drawing:  # fmt: skip
    """Bars of seconds, in a panel for each number of devices; labels and axis in one unit."""
    panels: dict[str, list[Bar]] = {}
    for group, bar in of_groups:
        panels.setdefault(devices(group.first.devices), []).append(bar)
    every = [bar for _, bar in of_groups]
    names = list(dict.fromkeys(bar.strategy for bar in every))
    name_width = min(max(map(drawing.width_of, names)), 0.30 * width) + 6
    left, short = name_width + 18, drawing.labels(names, name_width - 6)
    unit = time_unit(*(bar.seconds for bar in every))
    inner = width - left - max(drawing.width_of(unit.write(bar.seconds)) for bar in every) - 12
    longest = max(bar.end for bar in every) or 1.0
    counts = [(title, len(of_panel)) for title, of_panel in panels.items()]
    sheet = BARS.sheet(width, fills, map(len, panels.values()))
    placed = BARS.on(sheet, counts, left, inner, longest, unit)
    for (axes, texts), of_panel in zip(placed, panels.values(), strict=True):
        _panel(axes, of_panel, marks, longest)
        for bar, y in zip(of_panel, texts, strict=True):
            sheet.text(name_width, y, short[bar.strategy], ha="right")
            sheet.text(left + inner * bar.end / longest + 7, y, unit.write(bar.seconds), "muted")
    return sheet


def _panel(axes: Any, bars: Sequence[Bar], marks: Mapping[str, StrategyMark], most: float) -> None:
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_color(INKS["muted"].paint)
    ends: list[Box] = []
    for y, bar in enumerate(bars):
        if bar.whiskers:
            ends.append((*bar.whiskers, y, y))
            ends += [(end, end, y - 0.14, y + 0.14) for end in bar.whiskers]
        mark = marks[bar.strategy]
        outside = -9 * most / axes.get_window_extent().width
        axes.plot(outside, y, mark.marker, clip_on=False, **drawing.marker(mark))
    stacked(axes, ((y, bar.parts) for y, bar in enumerate(bars)), 0.31, lying=True)
    drawing.lines(axes, ends, linewidth=1.2)


@dataclass(frozen=True)
class ColumnPanel:
    """Stacks of parts at places of an axis, names below, lines across. end: of it, in places."""

    title: str
    stacks: Sequence[Stack]
    names: Mapping[int, str]
    lines: Sequence[Box]
    end: int


@dataclass(frozen=True)
class ColumnPanels:
    """Panels of stacks in rows, all on one axis of values from 0; pixels.

    left: of all panels. tall: a panel. below: each. half: of a stack's width, in places. line: how
    thick lines are. places: what they are, below the last panels. unit: of values up to one."""

    left: int
    tall: int
    below: int
    half: float
    line: float
    places: str
    unit: Callable[[float], Unit]
    gap: int = 14

    def draw(
        self, width: int, fills: Sequence[Fill], panels: Sequence[ColumnPanel], most: float
    ) -> Drawing:
        """The panels below a legend, with values up to `most`."""
        across = 2 if width < SIZES.wide else 4
        ticks, texts = round_ticks(most, 4, self.unit(most))
        wide = (width - self.left - self.gap * (across - 1)) / across
        tall = self.tall + SIZES.line + self.below
        sheet = Drawing(width, -(-len(panels) // across) * tall, fills)
        for i, panel in enumerate(panels):
            row, column = divmod(i, across)
            x, y = self.left + column * (wide + self.gap), sheet.top + row * tall
            axes = sheet.axes(x, y + SIZES.line + 2, wide, self.tall)
            title = drawing.fitted(panel.title, SIZES.bold * wide)
            sheet.text(x, y + 12, title, fontweight="bold")
            if i >= len(panels) - across:
                axes.set_xlabel(self.places, labelpad=1)
            stacked(axes, panel.stacks, self.half)
            drawing.lines(axes, panel.lines, linewidth=self.line)
            axes.set(xlim=(-0.6, panel.end - 0.4), ylim=(0, most))
            axes.set_xticks(list(panel.names), list(panel.names.values()))
            axes.grid(True, axis="y")
            axes.set_yticks(ticks, [""] * len(ticks) if column else texts)
        return sheet


def stacked(axes: Any, stacks: Iterable[Stack], half: float, lying: bool = False) -> None:
    """Stacks, half of whose width is `half`, of parts one above the other, or, `lying`, beside."""
    places: dict[Fill, list[Box]] = {}
    for x, parts in stacks:
        end = 0.0
        for fill, value in parts:
            if value > 0:
                ends = (x - half, x + half), (end, end + value)
                (a, b), (c, d) = reversed(ends) if lying else ends
                places.setdefault(fill, []).append((a, b, c, d))
                end += value
    for fill, of_fill in places.items():
        drawing.boxes(axes, fill, of_fill)


def round_ticks(most: float, count: int, unit: Unit) -> tuple[list[float], list[str]]:
    """About so many places from 0 to `most`, of round numbers of a unit, and these as texts."""
    from matplotlib.ticker import MaxNLocator

    end = (most or 1.0) / unit.one * (1 + 1e-9)
    steps = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]).tick_values(0, end)
    numbers = [float(number) for number in steps if number <= end]
    return [number * unit.one for number in numbers], list(map(unit.tick, numbers))


def log_ticks(least: float, most: float, count: int, unit: Unit) -> tuple[list[float], list[str]]:
    """At most so many of an axis of orders of magnitude, whose ends are a factor of 1.5 apart."""
    for digits in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)):
        numbers = [digit * 10.0**power for power in range(-9, 9) for digit in digits]
        within = [number for number in numbers if least <= number * unit.one <= most]
        if len(within) > 2:
            break
    shown = within[:: -(-len(within) // count)]
    return [number * unit.one for number in shown], list(map(unit.tick, shown))
