"""The least sum of passages under a bound of the slowest stage: one dynamic programme.

    D(i, r)     = least sum of t + x of stages of components i .. n-1 on the last r devices, where
                  every stage has (m - 1) t + e <= cap
    D_k(i, r)   = the same with k stages: their memory in flight follows from k

Where no stage of the best D needs more memory than it has, that is the answer. Else D_k is built
from k = 1 on. A state of more stages that takes no less than one of fewer is dropped: what follows
in front holds less with fewer. States that leave too few devices to those in front are dropped."""

from collections.abc import Iterator, Sequence

import numpy as np

from synchromesh.planner.chain.problem import Floats
from synchromesh.planner.chain.table import Ints

from .problem import PlannedStage, StageProblem, in_flight

INF = float("inf")


class StageWalk:
    """The stages of a problem under one number of micro-batches, by [kind of the group, way,
    first component, end, size of the group]."""

    def __init__(self, problem: StageProblem, micro_batches: int) -> None:
        self.problem, self.micro_batches = problem, micro_batches
        ways = problem.ways(micro_batches)
        possible = np.isfinite(ways.seconds)
        once = np.where(possible, ways.seconds, 0.0)
        slowdown, limit = np.array(problem.kinds).T[:, :, None, None, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            fitting = np.where(ways.kept > 0, (limit - ways.resident) / ways.kept, micro_batches)
        fitting = np.where(ways.resident <= limit, fitting, 0)
        self.most = np.clip(fitting, 0, micro_batches).astype(np.int16)  # that memory holds
        possible = possible & (self.most > 0)
        self.passage = np.where(possible, slowdown * once + ways.fill, INF)
        self.slowest = np.where(possible, (micro_batches - 1) * slowdown * once + ways.end, INF)
        self.sizes = np.array(problem.sizes) // problem.unit
        self.units = problem.devices // problem.unit
        left = np.arange(self.units + 1) - self.sizes[:, None]  # [size, units left]
        self._after = np.where(left >= 0, left, self.units + 1)  # where nothing is

    def caps(self, below: float) -> Floats:
        """All values below `below` that the slowest stage may have, ascending."""
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
        found = self._closed(costs, until)
        if not np.isfinite(found[0, self.units]):
            return None
        plan = self._back(allowed, [found])
        if self._fits(plan):
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
        found = np.full((count + 1, self.units + 2), INF)
        found[count, 0] = 0.0
        behind = np.full((count + 1, len(self.sizes), self.units + 1), INF)
        behind[count] = found[count][self._after]
        for i in reversed(range(count)):
            self._step(i, costs, behind, found, until)
            behind[i] = found[i][self._after]
        return found

    def _step(self, i: int, costs: Floats, behind: Floats, found: Floats, until: Ints) -> None:
        """D of component i, of what is behind each of its stages."""
        if until[i] <= 0:
            return
        columns = slice(1, int(until[i]) + 1)
        if len(costs) == 1:
            j, size = np.nonzero(np.isfinite(costs[0, i, i + 1 :]))
            if len(j):
                stage = costs[0, i, i + 1 + j, size]
                found[i, columns] = (stage[:, None] + behind[i + 1 + j, size, columns]).min(0)
            return
        kind = self.problem.kind_of[:, columns]
        size = np.arange(len(self.sizes))[:, None]
        stage = np.moveaxis(costs[:, i, i + 1 :], 0, -1)[:, size, kind]  # [j, size, left]
        found[i, columns] = (stage + behind[i + 1 :, :, columns]).min((0, 1))

    def _layers(self, allowed: Floats, until: Ints) -> list[Floats] | None:
        """D_0, D_1 ... up to the first that a step of all devices is best with."""
        count = self.problem.components
        found = np.full((count + 1, self.units + 2), INF)
        found[count, 0] = 0.0
        layers, best = [found], found.copy()
        last = 0
        for depth in range(1, count + 1):
            held = in_flight(depth, self.micro_batches)
            costs = np.where(self.most >= held, allowed, INF).min(1)
            behind = layers[-1][:, self._after]
            found = np.full_like(found, INF)
            for i in range(count - depth + 1):
                self._step(i, costs, behind, found, until)
            found[found >= best] = INF
            np.minimum(best, found, out=best)
            if not np.isfinite(found).any():
                break
            layers.append(found)
            if np.isfinite(found[0, self.units]):
                last = depth
        return layers[: last + 1] if last else None

    def _back(self, allowed: Floats, layers: list[Floats]) -> tuple[PlannedStage, ...]:
        """The stages that the best D consists of; one layer: of D, else of D_k."""
        problem, stages = self.problem, []
        i, left = 0, self.units
        while i < problem.components:
            depth = len(layers) - 1
            held = in_flight(depth, self.micro_batches) if depth else 1
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

    def _fits(self, plan: Sequence[PlannedStage]) -> bool:
        """Whether memory holds what is in flight."""
        held = [in_flight(len(plan) - s, self.micro_batches) for s in range(len(plan))]
        return all(self.most[at] >= h for at, h in zip(self._places(plan), held, strict=True))

    def seconds(self, plan: Sequence[PlannedStage]) -> tuple[float, float]:
        """The sum of passages, and what the slowest stage takes."""
        places = list(self._places(plan))
        passages = sum(float(self.passage[at]) for at in places)
        return passages, max(float(self.slowest[at]) for at in places)

    def _places(self, plan: Sequence[PlannedStage]) -> Iterator[tuple[int, ...]]:
        """Where each stage stands in the arrays."""
        problem, start = self.problem, 0
        for stage in plan:
            kind = problem.kinds.index(problem.kind(start, stage.devices))
            size = problem.sizes.index(stage.devices)
            yield kind, stage.way, stage.first, stage.end, size
            start += stage.devices
