"""A comparison as the page shows it: how its strategies are drawn, and what tells it apart."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from synchromesh.report.drawing import Drawing, drawn
from synchromesh.report.figure import PageFigure, PageTable
from synchromesh.report.numbers import devices
from synchromesh.report.palette import StrategyMark
from synchromesh.results.groups import RunComparison, RunGroup


@dataclass(frozen=True)
class Subject:
    """name: prefix of the ids of its figures. place: what tells it from the others of the page,
    in words, "" where there is no other."""

    comparison: RunComparison
    marks: Mapping[str, StrategyMark]
    name: str
    place: str = ""

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

    def panels(self, has: Callable[[RunGroup], object]) -> list[tuple[str, tuple[RunGroup, ...]]]:
        """By number of devices the groups that have something, with the panel's title."""
        found = [
            (n, [g for g in self.comparison.on(n) if has(g)]) for n in self.comparison.devices
        ]
        return [(devices(n), tuple(groups)) for n, groups in found if groups]
