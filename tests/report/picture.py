"""What stands where in a drawing: texts, lines and markers, read from its SVG."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A path of straight lines; style: of CSS. clipped: whether only a part may be seen."""

    points: tuple[Point, ...]
    style: str
    clipped: bool

    @property
    def dash(self) -> str:
        found = re.search(r"stroke-dasharray:([\d.]+)", self.style)
        return found[1] if found else ""


@dataclass(frozen=True)
class Picture:
    """texts: what is written, at its anchor. lines: those without a fill. marks: where one is."""

    texts: tuple[tuple[str, Point], ...]
    lines: tuple[Line, ...]
    marks: tuple[tuple[str, Point], ...]

    def at(self, text: str) -> Point:
        """Where a text stands; it must be there once."""
        (place,) = [place for words, place in self.texts if words == text]
        return place

    def of(self, ink: str, width: float = 1.8) -> list[Line]:
        """The lines of an ink, of this width."""
        stroke = (f"stroke:var(--{ink})", f"stroke-width:{width:g}")
        return [line for line in self.lines if set(stroke) <= set(line.style.split(";"))]


def read(svg: str) -> Picture:
    texts, lines, marks = [], [], []
    root = ElementTree.fromstring(svg)
    for defs in root.findall("defs"):
        root.remove(defs)
    for element in root.iter():
        style = element.get("style", "")
        place = float(element.get("x", 0)), float(element.get("y", 0))
        if element.tag == "text":
            texts.append((element.text or "", place))
        elif element.tag == "use":
            marks.append((style, place))
        elif element.tag == "path" and "fill:none" in style:
            points = tuple(_points(element.get("d", "")))
            lines.append(Line(points, style, "clip-path" in element.attrib))
    return Picture(tuple(texts), tuple(lines), tuple(marks))


def _points(path: str) -> Iterator[Point]:
    x = y = 0.0
    for kind, rest in re.findall(r"([MLHV])([-\d. ]+)", path):
        numbers = [float(number) for number in rest.split()]
        if kind in "ML":
            x, y = numbers
        else:
            x, y = (numbers[0], y) if kind == "H" else (x, numbers[0])
        yield x, y
