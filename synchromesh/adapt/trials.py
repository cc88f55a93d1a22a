"""Trials: plans that are predicted to be nearly as quick as the chosen one are run for some steps
each, and the one under which steps take least stays.

    steps       1 .. 8 | 9 .. 16  | 17 .. 24 | 25 ...     (more where they are short)
    plan        chosen | second   | third    | the quickest of the three

Among them is the chosen plan with the other number of pieces.

Predictions err by 6 to 7 % on average, and by 26 % where sixteen small micro-batches went through
two stages (docs/design.md); the median of some steps errs less. Every rank sees the same table of
times, so all come to the same conclusions. A trial goes on until its steps are steady
(monitor.py); where they show a change instead, all of them are void."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from synchromesh.adapt.monitor import LIMITS, Table, step_seconds
from synchromesh.planner.candidate import Candidate
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class TrialTuning:
    """Which plans are tried, for how long. Chosen; `near` covers the error of 26 % once seen."""

    near: float = 1.25  # times the chosen plan's predicted seconds, up to which others are tried
    most: int = 3  # of them
    steps: int = 5  # of each that are counted at least, whose median counts ...
    seconds: float = 0.2  # ... and as many as take so long, ...
    most_steps: int = 25  # ... but no more
    # of a step's seconds, by which another plan must be quicker. On two processes of one machine
    # medians of five steps of one plan lay 2 to 10 % apart, so that what surrounds the medians, as
    # many steps of n on either side as this times the root of n, must not meet either
    gain: float = 0.02
    around: float = 0.45  # 0.9 standard errors of the rank of a median
    share: float = 0.1  # of what is left of the run, that trials may take


TUNING = TrialTuning()


class Trials:
    """`next` names the plan for the steps to come. over: nothing is tried (any more). tables: the
    last steps under the plans that were tried."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """candidates: the plan in force first; none: nothing is tried."""
        self.tables: dict[Plan, list[Table]] = {}
        self._candidates, self._latest = candidates, list[Table]()
        self._queue = _near(candidates)
        self._of = candidates[0].plan if candidates else None  # the plan that is tried
        self.over = not self._queue

    def measured(self, plan: Plan) -> float:
        return median(map(step_seconds, self.tables[plan]))

    def next(
        self, plan: Plan, counted: Sequence[Table], steps: int, move: Callable[[Plan], float]
    ) -> tuple[Plan, str] | None:
        """Another plan than the one in force, and why; None where it stays for now.

        counted: its steps so far. steps: to come. move: seconds of a switch to a plan."""
        self.over = self.over or plan != self._of  # somebody else has switched
        if self.over or len(counted) < TUNING.steps:
            self._latest = []
            return None
        self._latest += counted[-1:] if self._latest else counted[-TUNING.steps :]
        now = median(map(step_seconds, self._latest))
        if len(self._latest) < _counted(now):
            return None
        self.tables[plan], self._latest = self._latest, []
        if len(self.tables) == 1:
            self._queue = _affordable(self._queue, now, TUNING.share * steps * now, move)
        if self._queue:
            following = self._queue.pop(0)
            self._of = following.plan
            return self._of, f"tried, as {following.seconds * 1e3:.0f} ms a step are predicted"
        self.over = True
        best = self._best()
        if best == plan:
            return None
        return best, f"of {len(self.tables)} plans that were tried the quickest"

    def left(self, plan: Plan) -> list[Candidate]:
        """The candidates, `plan` first, for trials that begin anew; none where these are over."""
        return [] if self.over else first(self._candidates, plan)

    def _best(self) -> Plan:
        chosen, *others = self.tables
        times = {plan: sorted(map(step_seconds, tables)) for plan, tables in self.tables.items()}
        limit, low = (1 - TUNING.gain) * self.measured(chosen), _surely(times[chosen], -1)
        gains = [p for p in others if self.measured(p) <= limit and _surely(times[p], 1) < low]
        return min(gains, key=self.measured, default=chosen)


def first(candidates: Sequence[Candidate], plan: Plan) -> list[Candidate]:
    """The candidates with that of `plan` first; none where it is not among them."""
    own = [c for c in candidates if c.plan == plan]
    return [*own, *(c for c in candidates if c.plan != plan)] if own else []


def _counted(now: float) -> int:
    """Steps of a trial that are counted, where one takes `now` seconds."""
    return max(TUNING.steps, min(TUNING.most_steps, int(TUNING.seconds / max(now, 1e-9))))


def _surely(times: Sequence[float], side: int) -> float:
    """Of sorted times, what their median is surely not beyond, to one side (1 or -1)."""
    at = len(times) // 2 + side * round(TUNING.around * sqrt(len(times)))
    return times[max(0, min(at, len(times) - 1))]


def _near(candidates: Sequence[Candidate]) -> list[Candidate]:
    if not candidates or candidates[0].time is None:
        return []
    chosen, *others = candidates
    near = [c for c in others if c.fits and c.seconds <= TUNING.near * chosen.seconds]
    return sorted(near, key=lambda c: c.seconds)[: TUNING.most]


def _affordable(
    candidates: Sequence[Candidate], now: float, left: float, move: Callable[[Plan], float]
) -> list[Candidate]:
    """The first ones, whose trials take no more than `left` seconds. now: seconds of a step."""
    kept = list[Candidate]()
    for candidate in candidates:
        together = max(1, candidate.plan.sync.steps)  # that count as one, under `local:H`
        steps = (LIMITS.settle + _counted(now)) * together
        left -= steps * max(now, candidate.seconds) + 2 * move(candidate.plan)
        if left < 0:
            break
        kept.append(candidate)
    return kept
