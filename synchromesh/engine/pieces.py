"""Pieces of a micro-batch, which take turns: their number is tried in the first steps, then kept.

More of them hide communication behind computation, and make every operator and message
smaller. Which is quicker depends on links and devices, so both are timed in alternation, in blocks
of three steps of which the first is not counted:

    step            1 2 3 | 4 5 6 | 7 8 9 | 10 11 12 | 13 ...
    pieces          1 1 1 | 4 4 4 | 4 4 4 |  1  1  1 | the quicker"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from synchromesh.engine.groups import Group
from synchromesh.values.schedule import PIECES


@dataclass(frozen=True)
class Trial:
    """The steps of the trial; both numbers were chosen, not measured."""

    order: tuple[int, ...] = (1, PIECES, PIECES, 1)  # pieces in each block
    block: int = 3  # steps, of which the first is not counted


TRIAL = Trial()


class PieceCount:
    """`micro_batches(least)` for the step at hand; `add(seconds)` after it.

    All ranks call alike."""

    def __init__(self, everyone: Group, possible: bool, chosen: int | None = None) -> None:
        """possible: whether there may be pieces. chosen: the number; none: it is tried."""
        self.everyone, self.possible = everyone, possible
        self.chosen = chosen if possible else 1
        self._times: dict[int, list[float]] = {n: [] for n in TRIAL.order}
        self._steps = 0
        self._used = 1

    def micro_batches(self, least: int) -> int:
        """Micro-batches of a step in which every data rank has at least `least` rows."""
        wanted = self._tried() if self.chosen is None else self.chosen
        self._used = wanted if least >= wanted else 1
        return self._used

    def add(self, seconds: float) -> None:
        """What the step took on this rank. After the last trial the ranks agree."""
        if self.chosen is not None:
            return
        if self._used == self._tried() and self._steps % TRIAL.block:
            self._times[self._used].append(seconds)
        self._steps += 1
        if self._steps == TRIAL.block * len(TRIAL.order):
            self._decide()

    def to_dict(self) -> dict[str, int | None]:
        """What a checkpoint keeps: sums and random draws depend on the number."""
        return {"chosen": self.chosen, "steps": self._steps}

    def resume(self, saved: Mapping[str, int | None]) -> None:
        """Continues as a run that was saved under the same plan."""
        if self.chosen is None:
            self.chosen, self._steps = saved["chosen"], saved["steps"] or 0

    def _tried(self) -> int:
        return TRIAL.order[self._steps // TRIAL.block]

    def _decide(self) -> None:
        """Keeps what is quicker on the slowest rank; an idle rank has measured nothing."""
        medians = {n: median(times) for n, times in self._times.items() if times}
        gathered = self.everyone.all_gather_json([medians.get(n) for n in (1, PIECES)])
        slowest = [max(filter(None, times), default=0.0) for times in zip(*gathered, strict=True)]
        self.chosen = PIECES if 0.0 < slowest[1] < slowest[0] else 1
