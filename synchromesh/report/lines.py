"""Lines of strategies: their style, and their names in a legend or beside the last points."""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import fmean
from typing import Any

from synchromesh.report.drawing import SIZES, Drawing, Point, flow, labels, marker, width_of
from synchromesh.report.palette import INKS, StrategyMark


def style(mark: StrategyMark) -> dict[str, Any]:
    """The style of a strategy's line: rivals are dashed; one without a marker is dotted."""
    return {
        "marker": mark.marker, "color": mark.ink.paint, "clip_on": False,
        "linestyle": ("--" if mark.rival else "-") if mark.marker else ":", **marker(mark),
    }  # fmt: skip


def below_legend(
    width: int, height: float, marks: Mapping[str, StrategyMark], names: Sequence[str]
) -> tuple[Drawing, float]:
    """A sheet with a legend of strategies, `height` pixels below it; where those begin."""
    short = labels(names, width / 2 - 24)
    places, top = flow([short[name] for name in names], 18, width)
    sheet = Drawing(width, top + height)
    for name, (x, y) in zip(names, places, strict=True):
        _dot(sheet, x + 6, y + 7, marks[name])
        sheet.text(x + 15, y + 11, short[name])
    return sheet, top


def label_room(names: list[str], width: int) -> int:
    """Pixels that `end_labels` takes beside axes, on a sheet of this width."""
    return ceil(min(max(map(width_of, names)), 0.26 * width)) + SIZES.leader


def end_labels(
    sheet: Drawing, axes: Any, lines: Mapping[str, Sequence[Point]],
    marks: Mapping[str, StrategyMark], room: float,
) -> None:  # fmt: skip
    """The name of each line where it ends, or, where there is no room in front of the next ends,
    beside the axes; moved apart, with a leader, where names would overlap."""
    box, short = axes.get_window_extent(), labels(list(lines), room - SIZES.leader)
    last = {name: axes.transData.transform(points[-1]).round(1) for name, points in lines.items()}
    ends = {name: (x, sheet.height - y) for name, (x, y) in last.items()}
    columns: dict[float, list[str]] = {}
    for name in sorted(ends, key=lambda name: ends[name][1]):
        x = ends[name][0]
        beyond = min((other for other, _ in ends.values() if other > x), default=sheet.width)
        fits = x + SIZES.leader + width_of(short[name]) <= beyond
        columns.setdefault(x if fits else round(box.x1, 1), []).append(name)
    for x, names in columns.items():
        wanted = [ends[name][1] for name in names]
        places = spaced(wanted, sheet.height - box.y1, sheet.height - box.y0)
        for name, y in zip(names, places, strict=True):
            _end_label(sheet, ends[name], (x, y), marks[name], short[name])


def _end_label(sheet: Drawing, end: Point, place: Point, mark: StrategyMark, name: str) -> None:
    (x, y), ground = place, {"facecolor": INKS["ground"].paint, "linewidth": 0, "pad": 1}
    moved, dot = end[0] != x or abs(y - end[1]) > 1, x + SIZES.leader - 10
    if moved:
        sheet.line((end[0], dot), (end[1], y), color=mark.ink.paint, linewidth=0.8)
        _dot(sheet, dot, y, mark)
    sheet.text(x + (SIZES.leader if moved else 8), y + 4, name, bbox=ground)


def spaced(wanted: Sequence[float], first: float, last: float) -> list[float]:
    """Places a gap apart or more, with the least sum of squares from the wanted ones (ascending),
    from `first` on, up to `last` if there is room: those that would overlap are centred."""
    gap, pools = SIZES.line - 4, list[list[float]]()
    for i, y in enumerate(wanted):
        pools.append([y - i * gap])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    last -= gap * (len(wanted) - 1)
    means = (fmean(pool) for pool in pools for _ in pool)
    return [max(min(mean, last), first) + i * gap for i, mean in enumerate(means)]


def _dot(sheet: Drawing, x: float, y: float, mark: StrategyMark) -> None:
    sheet.line((x,), (y,), linestyle="", marker=mark.marker, **marker(mark, 6))
