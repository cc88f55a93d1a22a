"""Lines of strategies: their style, and their names beside the last points."""

from collections.abc import Mapping, Sequence
from typing import Any

from synchromesh.report.drawing import LINE, Drawing, labels, marker, width_of
from synchromesh.report.palette import INKS, Mark, marks
from synchromesh.report.subject import Subject

Point = tuple[float, float]


def style(mark: Mark) -> dict[str, Any]:
    """The style of a strategy's line: rivals are dashed."""
    return {
        "marker": mark.marker, "color": mark.ink.paint, "clip_on": False,
        "linestyle": "--" if mark.rival else "-", **marker(mark),
    }  # fmt: skip


def legend(sheet: Drawing, drawn: Mapping[str, Mark], names: Sequence[str], top: float) -> float:
    """Markers with names, in rows from `top` on; the pixels below them."""
    x, y = 0.0, top
    short = labels(names, sheet.width / 2 - 24)
    for name in names:
        wide = width_of(short[name]) + 36
        if x and x + wide - 18 > sheet.width:
            x, y = 0.0, y + LINE
        sheet.figure.add_artist(_dot(sheet, x + 6, y + 7, drawn[name]))
        sheet.text(x + 15, y + 11, short[name])
        x += wide
    return y + LINE


def legend_rows(names: Sequence[str], width: int) -> int:
    """How many rows `legend` takes."""
    return round(legend(Drawing(width, 100), marks(names), names, 0) / LINE)


def label_room(names: list[str], width: float) -> float:
    """Pixels that `end_labels` takes beside axes, on a sheet of this width."""
    return float(min(max(map(width_of, names)), 0.26 * width) + 22)


def end_labels(
    sheet: Drawing, axes: Any, lines: dict[str, list[Point]], subject: Subject, room: float
) -> None:
    """The name of each line beside its last point, moved apart where they would overlap."""
    box = axes.get_window_extent()
    right, height = box.x1, sheet.height
    wanted = sorted(
        (height - axes.transData.transform(points[-1])[1], name) for name, points in lines.items()
    )
    places = spaced([y for y, _ in wanted], height - box.y1, height - box.y0 + 10)
    short = labels([name for _, name in wanted], room - 22)
    for (at, name), y in zip(wanted, places, strict=True):
        mark = subject.marks[name]
        end = axes.transData.transform(lines[name][-1])[0]
        faint = {"color": INKS["grid"].paint, "linewidth": 1, "zorder": 0}
        _line(sheet, (end, right + 5), (at, y), **faint)
        sheet.figure.add_artist(_dot(sheet, right + 11, y, mark))
        sheet.text(right + 20, y + 4, short[name])


def spaced(wanted: list[float], first: float, last: float, gap: float = LINE - 2) -> list[float]:
    """Places as near to the wanted ones (ascending) as a gap between them allows, from `first`
    on, and up to `last` if there is room."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + gap if places else first))
    limit = last
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


def _dot(sheet: Drawing, x: float, y: float, mark: Mark) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [x / sheet.width], [1 - y / sheet.height], linestyle="", marker=mark.marker,
        transform=sheet.figure.transFigure, **marker(mark, 6),
    )  # fmt: skip


def _line(sheet: Drawing, xs: Point, ys: Point, **look: Any) -> None:
    from matplotlib.lines import Line2D

    w, h = sheet.width, sheet.height
    sheet.figure.add_artist(
        Line2D([x / w for x in xs], [1 - y / h for y in ys],
               transform=sheet.figure.transFigure, **look)
    )  # fmt: skip
