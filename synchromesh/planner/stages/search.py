"""The search of pipeline stages: cuts, groups, ways and micro-batches of least step time.

For a cap M of the slowest stage, max_s ((m - 1) t_s + e_s) <= M, `StageWalk` finds the least sum
D(M) of passages, exactly. D never grows with M, so that a plan whose slowest stage lies between
lo and hi takes

    T  >=  D(hi) + lo

The interval of the least bound, of all numbers of micro-batches, is halved next, until no bound
is below the best plan: then that is the best there is. Only values that some stage has are caps.
Where the walks are used up first, the least bound says the gap.

A walk under a cap is one dynamic programme:

    D(i, r)     = least sum of t + x of stages of components i .. n-1 on the last r devices, where
                  every stage has (m - 1) t + e <= cap
    D_k(i, r)   = the same with k stages: their memory in flight follows from k

Where no stage of the best D needs more memory than it has, that is the answer. Else D_k is built
from k = 1 on. A state of more stages that takes no less than one of fewer is dropped: what follows
in front holds less with fewer. States that leave too few devices to those in front are dropped."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from synchromesh.planner.chain.problem import EXACT, Floats, Ints, gap
from synchromesh.planner.stages.problem import PlannedStage, StagePlan, StageProblem
from synchromesh.values.schedule import most_in_flight


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
    """A search under way: the best plan so far and the intervals that are left. What it may cost
    was chosen, so that `benchmarks.planning --stages` meets its goals."""

    WALKS: ClassVar[int] = 160  # caps that are tried beyond one of each number of micro-batches
    PARTS: ClassVar[int] = 1024  # of all caps: how near the least that suffices is found

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
        for _ in range(self.WALKS):
            if not self.heap or self.heap[0].bound >= self.seconds * (1 - EXACT):
                return self.best
            self._halve(heapq.heappop(self.heap))
        if self.best is None or not self.heap:
            return self.best
        return replace(self.best, gap=gap(self.seconds, self.heap[0].bound))

    def _begin(self, m: int) -> None:
        """All caps of m below the best plan, from about the least that devices may suffice for."""
        walk = self.walks[m] = StageWalk(self.problem, m)
        caps = self.caps[m] = walk.caps(self.seconds)
        lo, hi = 0, len(caps)
        while hi - lo > len(caps) // self.PARTS:
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
        """Walks under a cap; what is left lies above it, or below the plan's slowest stage."""
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


INF = float("inf")


class StageWalk:
    """Stages under one number of micro-batches, by [kind of the group, way, first, end, size]."""

    def __init__(self, problem: StageProblem, micro_batches: int) -> None:
        self.problem, self.micro_batches = problem, micro_batches
        costs = problem.costs(micro_batches)
        possible = np.isfinite(costs.seconds)
        once = np.where(possible, costs.seconds, 0.0)
        slowdown, limit = np.array(problem.kinds).T[:, :, None, None, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            fitting = (limit - costs.resident) / costs.kept
        fitting = np.where(costs.kept > 0, fitting, micro_batches)
        fitting = np.where(costs.resident <= limit, fitting, 0)
        self.most = np.clip(fitting, 0, micro_batches).astype(np.int16)  # that memory holds
        possible = possible & (self.most > 0)
        self.passage = np.where(possible, slowdown * once + costs.fill, INF)
        self.slowest = np.where(possible, (micro_batches - 1) * slowdown * once + costs.end, INF)
        self.sizes = np.array(problem.sizes) // problem.unit
        self.units = problem.devices // problem.unit
        left = np.arange(self.units + 1) - self.sizes[:, None]  # [size, units left]
        self._after = np.where(left >= 0, left, self.units + 1)  # where nothing is

    def caps(self, below: float) -> Floats:
        return np.unique(self.slowest[self.slowest < below])

    def suffices(self, cap: float) -> bool:
        """Whether the devices may suffice under a cap, whatever micro-batches are in flight."""
        costs = np.where(self.slowest <= cap, self.passage, INF).min(1)
        return bool(self._needed(costs)[-1] <= self.units)

    def least(self, cap: float) -> tuple[PlannedStage, ...] | None:
        """The stages of least sum of passages under the cap; None: there are none."""
        allowed = np.where(self.slowest <= cap, self.passage, INF)
        costs = allowed.min(1)  # with one micro-batch in flight
        needed = self._needed(costs)
        if needed[-1] > self.units:
            return None
        until = self.units - needed[:-1]  # devices that those in front leave at most
        sums = self._closed(costs, until)
        if not np.isfinite(sums[0, self.units]):
            return None
        plan = self._back(allowed, [sums])
        held = (most_in_flight(len(plan), (s,), self.micro_batches) for s in range(len(plan)))
        if all(self.most[at] >= h for at, h in zip(self._places(plan), held, strict=True)):
            return plan
        layers = self._layers(allowed, until)
        return None if layers is None else self._back(allowed, layers)

    def _needed(self, costs: Floats) -> Ints:
        """The fewest units of devices for components 0 .. j-1."""
        stage = np.where(np.isfinite(costs.min(0)), self.sizes, self.units + 1).min(-1)
        needed = np.full(self.problem.components + 1, self.units + 1)
        needed[0] = 0
        for j in range(1, len(needed)):
            needed[j] = (needed[:j] + stage[:j, j]).min()
        return needed

    def _closed(self, costs: Floats, until: Ints) -> Floats:
        """D, and a last column of inf."""
        count = self.problem.components
        sums = np.full((count + 1, self.units + 2), INF)
        sums[count, 0] = 0.0
        behind = np.full((count + 1, len(self.sizes), self.units + 1), INF)
        behind[count] = sums[count][self._after]
        for i in reversed(range(count)):
            self._step(i, costs, behind, sums, until)
            behind[i] = sums[i][self._after]
        return sums

    def _step(self, i: int, costs: Floats, behind: Floats, sums: Floats, until: Ints) -> None:
        """D of component i, of what is behind each of its stages."""
        if until[i] <= 0:
            return
        columns = slice(1, int(until[i]) + 1)
        if len(costs) == 1:
            j, size = np.nonzero(np.isfinite(costs[0, i, i + 1 :]))
            if len(j):
                stage = costs[0, i, i + 1 + j, size]
                sums[i, columns] = (stage[:, None] + behind[i + 1 + j, size, columns]).min(0)
            return
        kind = self.problem.kind_of[:, columns]
        size = np.arange(len(self.sizes))[:, None]
        stage = np.moveaxis(costs[:, i, i + 1 :], 0, -1)[:, size, kind]  # [j, size, left]
        sums[i, columns] = (stage + behind[i + 1 :, :, columns]).min((0, 1))

    def _layers(self, allowed: Floats, until: Ints) -> list[Floats] | None:
        """D_0, D_1 ... up to the first that a step of all devices is best with."""
        count = self.problem.components
        sums = np.full((count + 1, self.units + 2), INF)
        sums[count, 0] = 0.0
        layers, best = [sums], sums.copy()
        last = 0
        for depth in range(1, count + 1):
            held = most_in_flight(depth, (0,), self.micro_batches)
            costs = np.where(self.most >= held, allowed, INF).min(1)
            behind = layers[-1][:, self._after]
            sums = np.full_like(sums, INF)
            for i in range(count - depth + 1):
                self._step(i, costs, behind, sums, until)
            sums[sums >= best] = INF
            np.minimum(best, sums, out=best)
            if not np.isfinite(sums).any():
                break
            layers.append(sums)
            if np.isfinite(sums[0, self.units]):
                last = depth
        return layers[: last + 1] if last else None

    def _back(self, allowed: Floats, layers: list[Floats]) -> tuple[PlannedStage, ...]:
        """The stages that the best D consists of; one layer: of D, else of D_k."""
        problem, stages = self.problem, []
        i, left = 0, self.units
        while i < problem.components:
            depth = len(layers) - 1
            held = most_in_flight(depth, (0,), self.micro_batches) if depth else 1
            kind = problem.kind_of[:, left]
            size = np.arange(len(self.sizes))
            at = allowed[kind, :, i, :, size]  # [size, way, j]
            at = np.where(self.most[kind, :, i, :, size] >= held, at, INF)
            behind = layers[-2 if depth else 0][:, self._after[:, left]].T  # [size, j]
            total = at + behind[:, None, :]
            s, way, j = (int(x) for x in np.unravel_index(total.argmin(), total.shape))
            stages.append(PlannedStage(i, j, problem.sizes[s], way))
            i, left = j, left - int(self.sizes[s])
            layers = layers[:-1] if depth else layers
        return tuple(stages)

    def seconds(self, plan: Sequence[PlannedStage]) -> tuple[float, float]:
        """The sum of passages, and what the slowest stage takes."""
        places = list(self._places(plan))
        passages = sum(float(self.passage[at]) for at in places)
        return passages, max(float(self.slowest[at]) for at in places)

    def _places(self, plan: Sequence[PlannedStage]) -> Iterator[tuple[int, ...]]:
        problem, start = self.problem, 0
        for stage in plan:
            kind = problem.kinds.index(problem.kind(start, stage.devices))
            size = problem.sizes.index(stage.devices)
            yield kind, stage.way, stage.first, stage.end, size
            start += stage.devices
