"""A figure of the page: a title, its picture, what it shows in words, the table of its numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageTable:
    """Texts in rows and columns; the first `heads` columns name the row.

    caption: what it is a table of. groups: (label, columns) that stand above the columns."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1
    groups: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PageFigure:
    """drawings: of the picture at each width, as SVG elements. alternative: the picture in words.
    note: what must be known to read it."""

    name: str  # an id in the page
    title: str
    alternative: str
    drawings: tuple[str, ...]
    table: PageTable
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A question and its figures, or the sentence that says why there are none."""

    name: str
    title: str
    figures: tuple[PageFigure, ...]
    missing: str
