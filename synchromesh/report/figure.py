"""A figure of the page: a title, its picture, what it shows in words, the table of its numbers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from synchromesh.report.drawing import Drawing, drawn
from synchromesh.report.palette import StrategyMark
from synchromesh.results.groups import RunComparison, RunGroup

T = TypeVar("T")


@dataclass(frozen=True)
class PageTable:
    """Texts in rows and columns, `caption` above; the first `heads` columns name the row."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1


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


@dataclass(frozen=True)
class Subject:
    """A comparison as the page shows it. marks: of strategies. name: prefix of its figures' ids.
    place: what tells it from others of the page, "" where there is none."""

    comparison: RunComparison
    marks: Mapping[str, StrategyMark]
    name: str
    place: str = ""

    def known(self, of: Callable[[RunGroup], T | None]) -> list[tuple[RunGroup, T]]:
        return [(g, value) for g in self.comparison.groups if (value := of(g)) is not None]

    def figure(
        self, kind: str, title: str, alternative: str, paint: Callable[[int], Drawing],
        table: PageTable, note: str = "",
    ) -> PageFigure:  # fmt: skip
        """A figure of the comparison, painted at each width; there is one of a kind."""
        name, title = f"{self.name}-{kind}", f"{title}: {self.place}" if self.place else title
        return PageFigure(name, title, alternative, drawn(name, paint), table, note)

    def table(
        self, caption: str, columns: Iterable[str],
        rows: Iterable[tuple[RunGroup, Iterable[str]]],
    ) -> PageTable:  # fmt: skip
        """A table of groups: strategy and devices name a row, the other columns are `columns`."""
        cells = tuple((g.first.strategy, str(g.first.devices), *rest) for g, rest in rows)
        return PageTable(caption, ("strategy", "devices", *columns), cells, heads=2)
