"""A drawing by matplotlib as inline SVG: a width in pixels, colours by the page's style sheet.

matplotlib draws with one colour for each ink; in its SVG these become `var(--ink)`, so that one
drawing serves light and dark. Texts stay text, in the page's font; places are measured with
DejaVu Sans, which is wider than what browsers take."""

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from xml.etree import ElementTree

from synchromesh.report.palette import INKS, Fill, StrategyMark

WIDE, NARROW = 720, 350  # pixels: of the page's column, of a phone's screen
TEXT, SMALL = 12.0, 11.0  # pixels
BOLD = 0.86  # width of a text over that of the same in bold letters
LINE = 18  # pixels between lines of text
Box = tuple[float, float, float, float]
_SVG = "{http://www.w3.org/2000/svg}"
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "synchromesh", "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "font.size": SMALL, "axes.titlesize": TEXT,
    "axes.labelsize": SMALL, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.facecolor": "none", "figure.facecolor": "none", "figure.dpi": 72,
    "hatch.linewidth": 0.8, "lines.linewidth": 1.8, "grid.linewidth": 0.8,
    "text.color": INKS["text"].paint, "axes.labelcolor": INKS["muted"].paint,
    "axes.edgecolor": INKS["muted"].paint, "xtick.color": INKS["muted"].paint,
    "ytick.color": INKS["muted"].paint, "grid.color": INKS["grid"].paint,
    "xtick.labelcolor": INKS["muted"].paint, "ytick.labelcolor": INKS["text"].paint,
    "xtick.major.size": 3, "ytick.major.size": 0, "axes.formatter.useoffset": False,
}  # fmt: skip


class Drawing:
    """A sheet of so many pixels, on which axes are placed from its upper left corner."""

    def __init__(self, width: int, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.narrow = width < WIDE
        self.figure: Any = Figure(figsize=(width / 72, height / 72), dpi=72)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Axes whose frame has this place, in pixels."""
        w, h = self.width, self.height
        return self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))

    def text(self, x: float, y: float, words: str, ink: str = "text", **style: Any) -> None:
        """A line whose base line is `y` pixels from above."""
        style = {"fontsize": SMALL, "va": "baseline", **style}
        paint = INKS[ink].paint
        self.figure.text(x / self.width, 1 - y / self.height, words, color=paint, **style)

    def legend(self, fills: Iterable[Fill], top: float) -> None:
        """Swatches with labels, in rows from `top` on; `legend_height` says how many."""
        from matplotlib.patches import Rectangle

        for fill, x, y in _flow(list(fills), self.width):
            self.figure.add_artist(
                Rectangle(
                    (x / self.width, 1 - (top + y + 12) / self.height), 16 / self.width,
                    11 / self.height, transform=self.figure.transFigure, linewidth=0,
                    **filled(fill),
                )
            )  # fmt: skip
            self.text(x + 22, top + y + 11, fill.label)


def drawn(name: str, paint: Callable[[int], Drawing]) -> tuple[str, str]:
    """The picture at both widths, as SVG elements; `name` makes their ids unique in the page."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        return (
            _svg(paint(WIDE), f"{name}-w", "wide"),
            _svg(paint(NARROW), f"{name}-n", "narrow"),
        )


def filled(fill: Fill) -> dict[str, Any]:
    """The colours of a patch: its ink, the pattern in that of the ground."""
    pattern = {"hatch": fill.hatch} if fill.hatch else {}
    return {"facecolor": fill.ink.paint, "edgecolor": INKS["ground"].paint, **pattern}


def boxes(axes: Any, fill: Fill, places: Sequence[Box]) -> None:
    """Rectangles of one fill, (left, right, one end, the other end) each, as one path."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if places:
        paths = [
            Path([(a, low), (b, low), (b, high), (a, high), (a, low)], closed=True)
            for a, b, low, high in places
        ]
        whole = Path.make_compound_path(*paths)
        axes.add_patch(PathPatch(whole, linewidth=0, clip_on=False, **filled(fill)))


def lines(axes: Any, ends: Sequence[Box], ink: str = "text", **style: Any) -> None:
    """Straight lines, (x from, x to, y from, y to) each, as one path."""
    nan = float("nan")
    if ends:
        xs = [x for a, b, _, _ in ends for x in (a, b, nan)]
        ys = [y for _, _, a, b in ends for y in (a, b, nan)]
        axes.plot(xs, ys, color=INKS[ink].paint, clip_on=False, **style)


def marker(mark: StrategyMark, size: float = 7.0) -> dict[str, Any]:
    """The style of a strategy's marker."""
    face = INKS["ground"] if mark.rival else mark.ink
    return {
        "markersize": size + (3 if mark.marker == "*" else 0), "markeredgewidth": 1.5,
        "markerfacecolor": face.paint, "markeredgecolor": mark.ink.paint,
    }  # fmt: skip


def legend_height(fills: Iterable[Fill], width: int) -> float:
    """Pixels that `Drawing.legend` takes."""
    return max((y for _, _, y in _flow(list(fills), width)), default=-LINE) + LINE


@cache
def width_of(words: str, fontsize: float = SMALL) -> float:
    """Pixels of a line of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=["DejaVu Sans"], size=fontsize)
    return float(text_to_path.get_text_width_height_descent(words, font, ismath=False)[0])


def fitted(words: str, width: float, fontsize: float = SMALL) -> str:
    """As much of a text as so many pixels hold, `…` where some is left out; "" if nothing is."""
    words = " ".join(words.split())
    if width_of(words, fontsize) <= width:
        return words
    while words and width_of(words + "…", fontsize) > width:
        words = words[:-1]
    return words.rstrip() + "…" if len(words) > 1 else ""


def labels(names: Sequence[str], width: float) -> dict[str, str]:
    """Names as so many pixels hold them, different from one another."""
    found: dict[str, str] = {}
    for name in names:
        label = fitted(name, width)
        if label in found.values():
            number = f" ({len(found) + 1})"
            label = fitted(name, width - width_of(number)) + number
        found[name] = label
    return found


def _flow(fills: Sequence[Fill], width: int) -> list[tuple[Fill, float, float]]:
    placed, x, y = [], 0.0, 0.0
    for fill in fills:
        wide = 22 + width_of(fill.label)
        if x and x + wide > width:
            x, y = 0.0, y + LINE
        placed.append((fill, x, y))
        x += wide + 18
    return placed


def _svg(drawing: Drawing, prefix: str, kind: str) -> str:
    out = io.StringIO()
    drawing.figure.savefig(out, format="svg", dpi=72, metadata={"Date": None}, transparent=True)
    root = ElementTree.fromstring(out.getvalue())
    _clean(root)
    box = f"0 0 {drawing.width} {drawing.height:g}"
    root.attrib = {"viewBox": box, "class": f"chart {kind}", "aria-hidden": "true"}
    root.set("width", str(drawing.width))
    _rename(root, prefix)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element) -> None:
    """Leaves out what says nothing: metadata, groups, invisible frames, digits; inks by name."""
    element.tag = element.tag.removeprefix(_SVG)
    kept: list[ElementTree.Element] = []
    for child in element:
        _clean(child)
        if child.tag in ("metadata", "style") or _invisible(child):
            continue
        if (child.tag == "g" and not child.attrib) or (child.tag == "defs" and not len(child)):
            kept.extend(child)
        else:
            kept.append(child)
    element[:] = kept
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    if element.tag == "g":
        element.attrib.pop("id", None)
    for key, value in list(element.attrib.items()):
        if key == "style":
            element.set(key, _inked(value))
        elif key in ("fill", "stroke"):
            element.set(key, _PAINTS.get(value, value))
        elif key == "d":
            element.set(key, _shorter(_rounded(value)))
        elif key in ("x", "y", "transform", "width", "height"):
            element.set(key, _rounded(value))
        elif key.endswith("}href"):
            element.set("href", element.attrib.pop(key))
    if element.get("transform", "").startswith("rotate(0 "):
        del element.attrib["transform"]


def _invisible(element: ElementTree.Element) -> bool:
    style = element.get("style", "")
    return element.tag == "path" and "fill:none" in style and "stroke:" not in style


def stacked(axes: Any, bars: Iterable[tuple[float, dict[Fill, float]]], half: float) -> None:
    """Bars at some places, half of whose width is `half`, of parts one above the other."""
    places: dict[Fill, list[Box]] = {}
    for x, parts in bars:
        bottom = 0.0
        for fill, value in parts.items():
            if value > 0:
                places.setdefault(fill, []).append((x - half, x + half, bottom, bottom + value))
                bottom += value
    for fill, found in places.items():
        boxes(axes, fill, found)


@dataclass(frozen=True)
class Grid:
    """Panels in rows, in pixels: what is left of all, how tall one is, and what is below each."""

    left: int
    tall: int
    below: int
    gap: int = 14


def small_multiples(
    width: int, fills: Sequence[Fill], titles: Sequence[str], unit: str, grid: Grid
) -> tuple[Drawing, list[tuple[Any, bool]]]:
    """A legend, and below it axes under each title, with `unit` below the last ones of a column;
    of each axes whether they are the first ones of a row."""
    across = 2 if width < WIDE else 4
    top = legend_height(fills, width) + 8
    wide = (width - grid.left - grid.gap * (across - 1)) / across
    tall = grid.tall + LINE + grid.below
    sheet = Drawing(width, top + -(-len(titles) // across) * tall)
    sheet.legend(fills, 0)
    places = []
    for i, title in enumerate(titles):
        x, y = grid.left + (i % across) * (wide + grid.gap), top + (i // across) * tall
        axes = sheet.axes(x, y + LINE + 2, wide, grid.tall)
        sheet.text(x, y + 12, fitted(title, BOLD * wide), fontweight="bold")
        if i >= len(titles) - across:
            axes.set_xlabel(unit, labelpad=1)
        places.append((axes, i % across == 0))
    return sheet, places


def round_numbers(most: float, count: int) -> list[float]:
    """About so many round numbers from 0 to `most`, for an axis."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10]).tick_values(0, most)
    return [float(tick) for tick in found if tick <= most * (1 + 1e-9)]


def _rounded(value: str) -> str:
    """With a decimal at most: tenths of pixels."""

    def shorter(match: re.Match[str]) -> str:
        number = f"{float(match[0]):.1f}".removesuffix(".0")
        return "0" if number == "-0" else number

    return re.sub(r"-?\d+(\.\d+)?", shorter, " ".join(value.split()))


def _shorter(path: str) -> str:
    """A path of M, L, z with H and V for lines along an axis; others stay as they are."""
    found, here, start = [], ("", ""), ("", "")
    for command in re.findall(r"[A-Za-z][^A-Za-z]*", path):
        kind, *point = command.split()
        if kind == "M" and len(point) == 2:
            here = start = (point[0], point[1])
            found.append(f"M{here[0]} {here[1]}")
        elif kind == "L" and len(point) == 2:
            x, y = point
            found.append(f"H{x}" if y == here[1] else f"V{y}" if x == here[0] else f"L{x} {y}")
            here = x, y
        elif kind == "z" and not point:
            if here == start and len(found) > 2 and not found[-1].startswith("M"):
                found.pop()  # the way back, which z takes
            found.append("z")
            here = start
        else:
            return path
    return "".join(found)


_PAINTS = {ink.paint: f"var(--{ink.name})" for ink in INKS.values()}
_DROPPED = ("font-family", "stroke-linejoin", "stroke-linecap")


def _inked(style: str) -> str:
    """A style attribute with inks for colours, without fonts."""
    kept = []
    for item in style.split(";"):
        key, _, value = (part.strip() for part in item.partition(":"))
        if key and key not in _DROPPED:
            kept.append(f"{key}:{_PAINTS.get(value, value)}")
    return ";".join(kept)


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Ids that are used get short names of this drawing, all others are left out."""
    text = ElementTree.tostring(root, encoding="unicode")
    used = list(dict.fromkeys(re.findall(r'(?:url\(#|href="#)([\w-]+)', text)))
    names = {old: f"{prefix}{i}" for i, old in enumerate(used)}
    for element in root.iter():
        old = element.attrib.pop("id", None)
        if old in names:
            element.set("id", names[old])
        for key, value in list(element.attrib.items()):
            if "#" in value:
                pattern = r"(url\(#|^#)([\w-]+)"
                element.set(key, re.sub(pattern, lambda m: m[1] + names.get(m[2], m[2]), value))
