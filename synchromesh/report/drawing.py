"""A drawing by matplotlib as inline SVG: a width in pixels, colours by the page's style sheet.

matplotlib draws with one colour for each ink; in its SVG these become `var(--ink)`, for light and
dark. Places are measured with DejaVu Sans, which is wider than what browsers take."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from xml.etree import ElementTree

from synchromesh.report.palette import INKS, Fill, StrategyMark


@dataclass(frozen=True)
class DrawingSizes:
    """What all drawings of the page have in common, in pixels; chosen by eye."""

    wide: int = 960  # a drawing as wide as the page's column
    narrow: int = 350  # and as a phone's screen
    text: float = 12.0
    small: float = 11.0
    line: int = 18  # between lines of text
    leader: int = 34  # from the end of a line to its name, where that was moved
    bold: float = 0.86  # width of a text over that of the same in bold letters, in browsers


SIZES = DrawingSizes()
Point = tuple[float, float]
Box = tuple[float, float, float, float]
_SVG = "{http://www.w3.org/2000/svg}"
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "synchromesh", "text.parse_math": False,
    "font.family": ["DejaVu Sans"], "font.size": SIZES.small,
    "axes.titlesize": SIZES.text, "axes.labelsize": SIZES.small,
    "xtick.labelsize": SIZES.small, "ytick.labelsize": SIZES.small,
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
    """A sheet of so many pixels, with axes by their upper left corners. fills: a legend above the
    sheet's `height`; `top` is where what is below it begins."""

    def __init__(self, width: int, height: float, fills: Sequence[Fill] = ()) -> None:
        from matplotlib.figure import Figure

        places, self.top = flow([fill.label for fill in fills], 22, width)
        self.width, self.height = width, self.top + height
        self.narrow = width < SIZES.wide
        self.figure: Any = Figure(figsize=(width / 72, self.height / 72), dpi=72)
        for fill, (x, y) in zip(fills, places, strict=True):
            self._swatch(fill, x, y)
            self.text(x + 22, y + 11, fill.label)

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Axes whose frame has this place, in pixels."""
        w, h = self.width, self.height
        return self.figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))

    def text(self, x: float, y: float, words: str, ink: str = "text", **style: Any) -> None:
        """A line whose base line is `y` pixels from above."""
        style = {"fontsize": SIZES.small, "va": "baseline", **style}
        paint = INKS[ink].paint
        self.figure.text(x / self.width, 1 - y / self.height, words, color=paint, **style)

    def line(self, xs: Sequence[float], ys: Sequence[float], **look: Any) -> None:
        """A line, or markers, at places in pixels."""
        from matplotlib.lines import Line2D

        w, h = self.width, self.height
        across, up = [x / w for x in xs], [1 - y / h for y in ys]
        self.figure.add_artist(Line2D(across, up, transform=self.figure.transFigure, **look))

    def _swatch(self, fill: Fill, x: float, y: float) -> None:
        from matplotlib.patches import Rectangle

        corner = (x / self.width, 1 - (y + 12) / self.height)
        size = (16 / self.width, 11 / self.height)
        style = {"transform": self.figure.transFigure, "linewidth": 0, **filled(fill)}
        self.figure.add_artist(Rectangle(corner, *size, **style))


def drawn(name: str, paint: Callable[[int], Drawing]) -> tuple[str, str]:
    """The picture at both widths, as SVG elements; `name` makes their ids unique in the page."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        wide = _svg(paint(SIZES.wide), f"{name}-w", "wide")
        return wide, _svg(paint(SIZES.narrow), f"{name}-n", "narrow")


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


@cache
def width_of(words: str, fontsize: float = SIZES.small) -> float:
    """Pixels of a line of text."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=["DejaVu Sans"], size=fontsize)
    return float(text_to_path.get_text_width_height_descent(words, font, ismath=False)[0])


def fitted(words: str, width: float, fontsize: float = SIZES.small) -> str:
    """As much of a text as so many pixels hold, `…` where some is left out; "" if nothing is."""
    words = " ".join(words.split())
    if width_of(words, fontsize) <= width:
        return words
    while words and width_of(words + "…", fontsize) > width:
        words = words[:-1]
    return words.rstrip() + "…" if len(words) > 1 else ""


def labels(names: Sequence[str], width: float) -> dict[str, str]:
    """Names as so many pixels hold them, different from one another."""
    shown: dict[str, str] = {}
    for name in names:
        label = fitted(name, width)
        if label in shown.values():
            number = f" ({len(shown) + 1})"
            label = fitted(name, width - width_of(number)) + number
        shown[name] = label
    return shown


def flow(names: Sequence[str], swatch: float, width: float) -> tuple[list[Point], float]:
    """Upper left corners of a legend's entries (swatch and name) in rows, and the pixels taken."""
    places, x, y = [], 0.0, 0.0
    for name in names:
        wide = swatch + width_of(name)
        if x and x + wide > width:
            x, y = 0.0, y + SIZES.line
        places.append((x, y))
        x += wide + 18
    return places, y + SIZES.line + 8 if places else 0.0


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
    element[:] = _kept(element)
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    if element.tag == "g":
        element.attrib.pop("id", None)
    for key, value in list(element.attrib.items()):
        if key in _WRITTEN:
            element.set(key, _WRITTEN[key](value))
        elif key.endswith("}href"):
            element.set("href", element.attrib.pop(key))
    if element.get("transform", "").startswith("rotate(0 "):
        del element.attrib["transform"]


def _kept(element: ElementTree.Element) -> list[ElementTree.Element]:
    """Its children, cleaned; in place of a group that says nothing what is in it."""
    kept: list[ElementTree.Element] = []
    for child in element:
        _clean(child)
        style = child.get("style", "")
        unseen = child.tag == "path" and "fill:none" in style and "stroke:" not in style
        if child.tag in ("metadata", "style") or unseen:
            continue
        if (child.tag == "g" and not child.attrib) or (child.tag == "defs" and not len(child)):
            kept.extend(child)
        else:
            kept.append(child)
    return kept


def _rounded(value: str) -> str:
    def shorter(match: re.Match[str]) -> str:
        number = f"{float(match[0]):.1f}".removesuffix(".0")
        return "0" if number == "-0" else number

    return re.sub(r"-?\d+(\.\d+)?", shorter, " ".join(value.split()))


def _shorter(path: str) -> str:
    """A path of M, L, z with H and V for lines along an axis; others stay as they are."""
    parts, here, start = [], ("", ""), ("", "")
    for command in re.findall(r"[A-Za-z][^A-Za-z]*", path):
        kind, *point = command.split()
        if kind == "M" and len(point) == 2:
            here = start = (point[0], point[1])
            parts.append(f"M{here[0]} {here[1]}")
        elif kind == "L" and len(point) == 2:
            x, y = point
            parts.append(f"H{x}" if y == here[1] else f"V{y}" if x == here[0] else f"L{x} {y}")
            here = x, y
        elif kind == "z" and not point:
            if here == start and len(parts) > 2 and not parts[-1].startswith("M"):
                parts.pop()  # the way back, which z takes
            parts.append("z")
            here = start
        else:
            return path
    return "".join(parts)


_PAINTS = {ink.paint: f"var(--{ink.name})" for ink in INKS.values()}
_STYLED = re.compile(r' style="([^"]*)"')
_DROPPED = ("font-family", "stroke-linejoin", "stroke-linecap")


def _inked(style: str) -> str:
    kept = []
    for item in style.split(";"):
        key, _, value = (part.strip() for part in item.partition(":"))
        if key and key not in _DROPPED:
            kept.append(f"{key}:{_painted(value)}")
    return ";".join(kept)


def _painted(value: str) -> str:
    return _PAINTS.get(value, value)


_WRITTEN: dict[str, Callable[[str], str]] = {  # attributes that become shorter
    "style": _inked, "fill": _painted, "stroke": _painted,
    "d": lambda path: _shorter(_rounded(path)),
    **dict.fromkeys(("x", "y", "transform", "width", "height"), _rounded),
}  # fmt: skip


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


class SharedStyles:
    """The styles of a page's drawings: a class for each, written once.

    <path style="fill:none;stroke:var(--grid)" .../>   ->   <path class="s3" .../>"""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def classed(self, drawing: str) -> str:
        """An SVG element with classes for its styles; those with an id in them stay."""

        def named(match: re.Match[str]) -> str:
            known, style = self._classes, match[1]
            if "#" in style:
                return match[0]
            return f' class="{known.setdefault(style, f"s{len(known)}")}"'

        return _STYLED.sub(named, drawing)

    def rules(self) -> str:
        """The style sheet of all classes so far."""
        return "\n".join(f".chart .{name}{{{style}}}" for style, name in self._classes.items())
