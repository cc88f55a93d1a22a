"""Lines of strategies: their style, and their names in a legend or beside the last points."""

from collections.abc import Mapping, Sequence
from typing import Any

from synchromesh.report.drawing import SIZES, Drawing, Point, flow, labels, marker, width_of
from synchromesh.report.palette import INKS, StrategyMark


def style(mark: StrategyMark) -> dict[str, Any]:
    """The style of a strategy's line: rivals are dashed."""
    return {
        "marker": mark.marker, "color": mark.ink.paint, "clip_on": False,
        "linestyle": "--" if mark.rival else "-", **marker(mark),
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


def label_room(names: list[str], width: float) -> float:
    """Pixels that `end_labels` takes beside axes, on a sheet of this width."""
    return float(min(max(map(width_of, names)), 0.26 * width) + 22)


def end_labels(
    sheet: Drawing, axes: Any, lines: Mapping[str, Sequence[Point]],
    marks: Mapping[str, StrategyMark], room: float,
) -> None:  # fmt: skip
    """The name of each line beside its last point, moved apart where they would overlap."""
    box = axes.get_window_extent()
    right, height = box.x1, sheet.height
    last = {name: axes.transData.transform(points[-1]) for name, points in lines.items()}
    wanted = sorted((height - y, name) for name, (_, y) in last.items())
    places = spaced([y for y, _ in wanted], height - box.y1, height - box.y0 + 10)
    short = labels([name for _, name in wanted], room - 22)
    for (at, name), y in zip(wanted, places, strict=True):
        faint = {"color": INKS["grid"].paint, "linewidth": 1, "zorder": 0}
        sheet.line((last[name][0], right + 5), (at, y), **faint)
        _dot(sheet, right + 11, y, marks[name])
        sheet.text(right + 20, y + 4, short[name])


def spaced(wanted: list[float], first: float, last: float) -> list[float]:
    """Places as near to the wanted ones (ascending) as a gap between them allows, from `first`
    on, and up to `last` if there is room."""
    places: list[float] = []
    gap = SIZES.line - 2
    for y in wanted:
        places.append(max(y, places[-1] + gap if places else first))
    for i in reversed(range(len(places))):
        places[i] = min(places[i], last)
        last = places[i] - gap
    return places


def _dot(sheet: Drawing, x: float, y: float, mark: StrategyMark) -> None:
    sheet.line((x,), (y,), linestyle="", marker=mark.marker, **marker(mark, 6))
