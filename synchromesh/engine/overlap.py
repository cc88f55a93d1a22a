"""Overlap: in how many pieces a step's rows walk through the program, tried in the first steps,
then kept.

More pieces hide traffic behind computation, and make every operator and message smaller. Which
wins depends on links and devices, so both are timed in turns, `BLOCK` steps each of which the
first is not counted:

    step      1 2 3 | 4 5 6 | 7 8 9 | 10 11 12 | 13 ...
    pieces    1 1 1 | 4 4 4 | 4 4 4 |  1  1  1 | the quicker
"""

from collections.abc import Mapping
from statistics import median

from synchromesh.engine.groups import Group

PIECES = 4
BLOCK = 3
ORDER = (1, PIECES, PIECES, 1)


class Overlap:
    """`pieces(least)` for the step at hand; `tell(seconds)` after it. All ranks call alike."""

    def __init__(self, everyone: Group, possible: bool, chosen: int | None = None) -> None:
        self.everyone = everyone
        self.chosen = chosen if possible else 1  # None: still trying
        self._times: dict[int, list[float]] = {1: [], PIECES: []}
        self._steps = 0
        self._used = 1

    def pieces(self, least: int) -> int:
        """Pieces for a step in which every data rank has at least `least` rows."""
        wanted = self.chosen if self.chosen is not None else ORDER[self._steps // BLOCK]
        self._used = wanted if least >= wanted else 1
        return self._used

    def tell(self, seconds: float) -> None:
        """What the step took on this rank. After the last trial the ranks agree."""
        if self.chosen is not None:
            return
        if self._used == ORDER[self._steps // BLOCK] and self._steps % BLOCK:
            self._times[self._used].append(seconds)
        self._steps += 1
        if self._steps == BLOCK * len(ORDER):
            self._decide()

    def to_dict(self) -> dict[str, int | None]:
        """What a checkpoint keeps: sums and random draws depend on the pieces."""
        return {"chosen": self.chosen, "steps": self._steps}

    def go_on(self, told: Mapping[str, int | None]) -> None:
        """Continues as a run that was saved under the same plan."""
        if self.chosen is None:
            self.chosen, self._steps = told["chosen"], told["steps"] or 0

    def _decide(self) -> None:
        mine = {n: median(times) for n, times in self._times.items() if times}
        every = self.everyone.all_gather_json([mine.get(n) for n in (1, PIECES)])
        told = [[t for t in times if t is not None] for times in zip(*every, strict=True)]
        one, many = (max(times, default=0.0) for times in told)  # an idle rank tells nothing
        self.chosen = PIECES if 0.0 < many < one else 1
