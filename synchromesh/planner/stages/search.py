"""The search of pipeline stages: cuts, groups, ways and micro-batches of least step time.

For a cap M of the slowest stage, max_s ((m - 1) t_s + e_s) <= M, `stage_walk` finds the least sum
D(M) of passages, exactly. D never grows with M, so that a plan whose slowest stage lies between
lo and hi takes

    T  >=  D(hi) + lo

The interval of the least bound, of all numbers of micro-batches, is halved next, until no bound
is below the best plan: then that is the best there is. Only values that some stage has are caps.
Where the walks are used up first, the least bound says the gap."""

import heapq
from dataclasses import dataclass, replace

import numpy as np

from synchromesh.planner.chain.problem import Floats
from synchromesh.planner.chain.walk import EXACT, gap

from .problem import StagePlan, StageProblem
from .walk import StageWalk


@dataclass(frozen=True)
class StageTuning:
    """What a search may cost; chosen, so that `benchmarks.planning --stages` meets its goals."""

    walks: int = 160  # caps that are tried beyond one of each number of micro-batches
    parts: int = 1024  # of all caps: how near the least one is found that devices suffice for


TUNING = StageTuning()


def search(problem: StageProblem) -> StagePlan | None:
    """The plan of least step time under 1F1B; None: no stages fit the devices' memory."""
    return _Search(problem).run()


@dataclass(frozen=True, order=True)
class _Interval:
    """Caps lo .. hi-1 of a number of micro-batches, of which no plan takes less than `bound`."""

    bound: float
    micro_batches: int
    lo: int
    hi: int
    passages: float  # the least sum with any of these caps


class _Search:
    """A search under way: the best plan so far and the intervals that are left."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.best: StagePlan | None = None
        self.heap: list[_Interval] = []
        self.walks: dict[int, StageWalk] = {}
        self.caps: dict[int, Floats] = {}

    @property
    def seconds(self) -> float:
        return self.best.seconds if self.best else float("inf")

    def run(self) -> StagePlan | None:
        for m in self.problem.micro_batches:
            self._begin(m)
        for _ in range(TUNING.walks):
            if not self.heap or self.heap[0].bound >= self.seconds * (1 - EXACT):
                return self.best
            self._halve(heapq.heappop(self.heap))
        if self.best is None or not self.heap:
            return self.best
        return replace(self.best, gap=gap(self.seconds, self.heap[0].bound))

    def _begin(self, m: int) -> None:
        """All caps of a number of micro-batches below the best plan, from about the least that
        devices may suffice for."""
        walk = self.walks[m] = StageWalk(self.problem, m)
        caps = self.caps[m] = walk.caps(self.seconds)
        lo, hi = 0, len(caps)
        while hi - lo > len(caps) // TUNING.parts:
            mid = (lo + hi) // 2
            lo, hi = (lo, mid) if walk.suffices(caps[mid]) else (mid + 1, hi)
        if lo < len(caps):
            self._try(_Interval(0.0, m, lo, len(caps), 0.0), len(caps) - 1)

    def _halve(self, interval: _Interval) -> None:
        """Tries the cap in the middle of those that may belong to a better plan."""
        caps = self.caps[interval.micro_batches]
        better = int(np.searchsorted(caps, self.seconds - interval.passages))
        hi = min(interval.hi, better)
        if interval.lo < hi:
            self._try(replace(interval, hi=hi), (interval.lo + hi) // 2)

    def _try(self, interval: _Interval, index: int) -> None:
        """Walks under one cap of an interval; what is left are those above it, and those below
        what the slowest stage of the plan takes that was found."""
        m = interval.micro_batches
        walk, caps = self.walks[m], self.caps[m]
        self._push(replace(interval, lo=index + 1))
        stages = walk.least(caps[index])
        if stages is None:
            return
        passages, slowest = walk.seconds(stages)
        if passages + slowest < self.seconds:
            self.best = StagePlan(stages, m, passages + slowest)
        below = int(np.searchsorted(caps, slowest))
        self._push(replace(interval, hi=below, passages=passages))

    def _push(self, interval: _Interval) -> None:
        if interval.lo < interval.hi:
            least = float(self.caps[interval.micro_batches][interval.lo])
            heapq.heappush(self.heap, replace(interval, bound=interval.passages + least))
