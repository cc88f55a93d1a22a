"""The planning problem: what a plan is wanted for; and the partitions of its step under plans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from synchromesh.planner.headroom import Headroom
from synchromesh.trace.partition.partition import (
    Analysis,
    Partition,
    overlaps,
    partition,
    unsharded,
)
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan

Say = Callable[[str], None]


@dataclass(frozen=True)
class PlanningProblem:
    """A traced step that is to run on devices, measured or described by data sheets alike."""

    step: Step
    rows: int  # of a global batch
    devices: int  # ranks of the run
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)  # paths in each component
    limits: tuple[float, ...] = ()  # bytes that each rank may use; none: no limit
    unsplittable: str = ""  # why the optimizer cannot update shards of a parameter; "": it can
    headroom: Headroom | None = None  # what `limits` leave of the device that they leave least of

    @property
    def names(self) -> tuple[str, ...]:
        return self.step.chain.names

    @property
    def limit(self) -> float:
        """Bytes that every rank may use."""
        return min(self.limits, default=float("inf"))

    def layouts(self, plan: Plan) -> tuple[Layout, ...]:
        """The layout of each component under `plan`."""
        return self.step.undivided(plan.layouts(self.names, self.devices, self.modules))

    def ranks(self, plan: Plan) -> Sequence[int]:
        """The ranks that take part in `plan`."""
        return plan.devices(self.devices)


class PartitionCache:
    """The partitions of a problem's step, each solved once for layouts of equal meshes.

    say: receives what planning by them is doing."""

    def __init__(self, problem: PlanningProblem, say: Say = lambda _: None) -> None:
        self.problem, self.say = problem, say
        self._analysis = None if problem.step.opaque else Analysis(problem.step)
        self._solved: dict[tuple[Layout, ...], Partition] = {}

    def of_layouts(self, layouts: tuple[Layout, ...]) -> Partition:
        """The partition with `layouts[i]` for component i. ValueError where there is none."""
        why = self.problem.unsplittable
        if why and any(x.shard_states != "none" and x.data > 1 for x in layouts):
            raise ValueError(why)
        if layouts not in self._solved:
            meshes = tuple(layout.mesh for layout in layouts)
            if meshes == layouts:
                self._solved[layouts] = self._solve(layouts)
            else:
                self._solved[layouts] = self.of_layouts(meshes).under(layouts)
        return self._solved[layouts]

    def _solve(self, layouts: tuple[Layout, ...]) -> Partition:
        step, rows = self.problem.step, self.problem.rows
        pins = unsharded(step, layouts) if self.problem.unsplittable else {}
        return partition(step, layouts, rows=rows, pins=pins, analysis=self._analysis)

    def partition(self, plan: Plan) -> Partition:
        """The partition under `plan`. ValueError where it allows none."""
        return self.of_layouts(self.problem.layouts(plan))

    def possible(self, plans: Iterable[Plan]) -> list[Partition]:
        """The partitions under the plans that allow one; `price` says of the rest why not."""
        found = []
        for plan in plans:
            with suppress(ValueError):
                found.append(self.partition(plan))
        return found

    def known(self, plan: Plan) -> Partition | None:
        """The partition under `plan`, if it has been solved."""
        return self._solved.get(self.problem.layouts(plan))

    def overlaps(self, plan: Plan) -> bool:
        """Whether several micro-batches may be interleaved under `plan`."""
        return overlaps(self.problem.step, self.partition(plan))
