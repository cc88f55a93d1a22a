"""A comparison as the page shows it: how its strategies are drawn, and what tells it apart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

    def title(self, words: str) -> str:
        return f"{words}: {self.place}" if self.place else words

    def panels(self, has: Callable[[RunGroup], object]) -> list[tuple[str, tuple[RunGroup, ...]]]:
        """By number of devices the groups that have something, with the panel's title."""
        found = [
            (n, [g for g in self.comparison.on(n) if has(g)]) for n in self.comparison.devices
        ]
        return [(devices(n), tuple(groups)) for n, groups in found if groups]

    def places(self, group: RunGroup) -> tuple[str, str]:
        """The first two cells of a row: strategy and devices."""
        return group.first.strategy, str(group.first.devices)
