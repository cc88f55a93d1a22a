"""The planning problem: what a plan is wanted for, and the facts that deciding it takes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

from torch.optim import Optimizer

from synchromesh.cost.planned_step import gradient_pattern
from synchromesh.trace.partition.local import LocalComponent
from synchromesh.trace.partition.partition import (
    Analysis,
    Partition,
    overlaps,
    partition,
    unsharded,
)
from synchromesh.trace.step import Step
from synchromesh.values import size
from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.buckets import MIB, SIZES
from synchromesh.values.holding import holdings
from synchromesh.values.layout import Layout
from synchromesh.values.optimizer import coupled, refuse_unusable
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Pattern, Profile
from synchromesh.values.schedule import PIECES

T = TypeVar("T")
Find = Callable[[], list[T]]
Write = Callable[[T], Any]  # an item as JSON
Read = Callable[[Any], T]  # and back
Say = Callable[[str], None]


def silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True, order=True)
class Headroom:
    """Bytes of a device that plans may use, those that are kept, and why so many."""

    usable: float
    kept: float
    why: str

    SHARE: ClassVar[float] = 0.05  # of a device's memory: of 148 plans that were measured
    # (benchmarks/README.md) none took more than 3.6 % more than was predicted
    # Bytes that a process on a CPU holds besides tensors: at most 24 MiB in steps of 18 models and
    # plans, once `heap.keep_small` was asked; loaders, logs and checkpoints take more.
    RESERVE: ClassVar[int] = 64 * 2**20

    @classmethod
    def of(
        cls, memory: float, asked: str | None = None, error: float = 0.0, reserve: float = 0.0
    ) -> "Headroom":
        """As `asked`: `10%` of the memory, or `4GiB`. Else the most of a share of it, of what
        plans may take more than is predicted (`error`, relative), and of what a process holds
        besides tensors (`reserve`, bytes): whichever it is, it has room for a part of the others.
        ValueError where `asked` is neither, or leaves nothing."""
        reasons = {
            f"{cls.SHARE:.0%} of it": cls.SHARE * memory,
            f"predictions may be off by {error:.0%}": memory * error / (1 + error),
            "what a process holds besides tensors": min(reserve, memory),
        }
        if asked is not None:
            part = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]+)?)%", asked := str(asked))
            if not part and not size.SIZE.fullmatch(asked):
                raise ValueError(f"headroom {asked!r}: no part, as 10%, and no size, as 4GiB")
            kept = float(part[1]) / 100 * memory if part else size.parse(asked)
            if kept >= memory:
                raise ValueError(f"headroom {asked} leaves nothing of {size.readable(memory)}")
            reasons = {"as asked for": kept}
        why = max(reasons, key=lambda reason: reasons[reason])
        return cls(memory - reasons[why], reasons[why], why)

    def __str__(self) -> str:
        shown = map(size.readable, (self.usable, self.usable + self.kept, self.kept))
        return "plans may use {} of a device's {}: {} are headroom ({})".format(*shown, self.why)


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
    allowed: Allowance = NOTHING  # what may be chosen that one device does not compute
    # of each rank, where what one host alone has is copied to another (`values.boxes.lent`)
    copying: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, step: Step, rows: int, modules: Mapping[str, Sequence[str]],
        headrooms: Sequence[Headroom], optimizer: Optimizer,
    ) -> "PlanningProblem":  # fmt: skip
        """ValueError for an optimizer that cannot be used. headrooms: of each rank."""
        refuse_unusable(optimizer)
        limits = tuple(x.usable for x in headrooms)
        unsplittable = coupled(optimizer)
        return cls(step, rows, len(headrooms), modules, limits, unsplittable, min(headrooms))

    @property
    def names(self) -> tuple[str, ...]:
        return self.step.chain.names

    @property
    def limit(self) -> float:
        return min(self.limits, default=float("inf"))

    def layouts(self, plan: Plan) -> tuple[Layout, ...]:
        return self.step.undivided(plan.layouts(self.names, self.devices, self.modules))

    def ranks(self, plan: Plan) -> Sequence[int]:
        return plan.devices(self.devices)


class PartitionCache:
    """Partitions of a step, each solved once for layouts of equal meshes. say: of what is done."""

    def __init__(self, problem: PlanningProblem, say: Say = silent) -> None:
        self.problem, self.say = problem, say
        self._analysis = None if problem.step.opaque else Analysis(problem.step)
        self._solved: dict[tuple[Layout, ...], Partition] = {}

    def of_layouts(self, layouts: tuple[Layout, ...]) -> Partition:
        """The partition with `layouts[i]` for component i. ValueError where there is none."""
        step, why = self.problem.step, self.problem.unsplittable
        if why and any(x.shard_states != "none" and x.data > 1 for x in layouts):
            raise ValueError(why)
        if layouts not in self._solved:
            meshes = tuple(layout.mesh for layout in layouts)
            if meshes == layouts:
                pins = unsharded(step, layouts) if why else {}
                made = partition(
                    step, layouts, rows=self.problem.rows, pins=pins, analysis=self._analysis
                )
            else:
                made = self.of_layouts(meshes).under(layouts)
            self._solved[layouts] = made
        return self._solved[layouts]

    def partition(self, plan: Plan) -> Partition:
        """The partition under `plan`. ValueError where it allows none."""
        return self.of_layouts(self.problem.layouts(plan))

    def possible(self, plans: Iterable[Plan]) -> list[Partition]:
        """The partitions under the plans that allow one; `price` says of the rest why not."""
        partitions = []
        for plan in plans:
            with suppress(ValueError):
                partitions.append(self.partition(plan))
        return partitions

    def known(self, plan: Plan) -> Partition | None:
        return self._solved.get(self.problem.layouts(plan))

    def overlaps(self, plan: Plan) -> bool:
        return overlaps(self.problem.step, self.partition(plan))


GRADIENT_BYTES = SIZES.full + MIB  # of a bucket, up to which all-reduces are asked for

Demand = tuple[str, Pattern, int]  # kind of a collective, its groups, bytes of payload


def collectives_of(partition: Partition, rows: int, devices: int) -> Iterator[Demand]:
    """What a partition sends for global batches of `rows`; gradients over those that sum them,
    over all data ranks, and over all devices."""
    trained = {
        p.name: p for c in partition.components for p in c.component.parameters if p.trainable
    }
    held = holdings(trained.values(), partition.placements, devices)
    for local in partition.components:
        for c in local.collectives:
            if c.ranks > 1:
                data = c.data or local.layout.data
                yield c.kind, Pattern(c.ranks, c.stride), c.payload(-(-rows // data))
        ranks = {Pattern(local.layout.data, local.layout.tensor), Pattern(devices)}
        own = (held[p.name] for p in local.component.parameters if p.trainable)
        ranks.update(map(gradient_pattern, own))
        yield from (d for pattern in ranks if pattern.size > 1 for d in _gradients(local, pattern))


def _gradients(local: LocalComponent, ranks: Pattern) -> Iterator[Demand]:
    bytes_ = sum(p.bytes for p in local.component.parameters if p.trainable)
    if bytes_:
        yield "all_reduce", ranks, min(bytes_, GRADIENT_BYTES)
    if local.layout.shard_states != "none":
        yield "all_gather", ranks, local.component.parameter_bytes
        yield "reduce_scatter", ranks, min(bytes_, GRADIENT_BYTES)


def served(partition: Partition, plan: Plan) -> Iterator[Demand]:
    """What servers receive and send is priced by (`cost.planned_step.served_seconds`)."""
    servers, components = plan.sync.servers, partition.components
    size = sum(p.bytes for c in components for p in c.component.parameters if p.trainable)
    ranks = max(c.layout.devices for c in components)
    if servers and ranks > 1:
        yield "send", Pattern(2), size * ranks // min(servers, ranks)


def scattering(partition: Partition) -> set[Pattern]:
    """The groups that scatter gradients, which have ways of their own to do it."""
    layouts = {local.layout for local in partition.components}
    return {Pattern(x.data, x.tensor) for x in layouts if x.shard_states != "none" and x.data > 1}


def program_rows(
    rows: int, layout: Layout, micro_batches: Collection[int] = (1,)
) -> tuple[int, ...]:
    """The rows at which a program is asked for, ascending: of a data block where global batches of
    `rows` are cut into any of so many micro-batches, and of a piece of the largest."""
    blocks = {-(-rows // (parts * layout.data)) for parts in micro_batches}
    return tuple(sorted({*blocks, -(-max(blocks) // PIECES)}))


class Facts(Protocol):
    """What deciding asks for: live ranks measure it, data sheets estimate it."""

    @property
    def partitions(self) -> "PartitionCache":
        """Of the problem that a plan is wanted for."""

    @property
    def extrapolation(self) -> float:
        """Times the rows of an equal block up to which what is known of a program holds."""

    def profile(
        self, partitions: Iterable[Partition], known: Profile | None,
        ranks: Sequence[int] | None = None, *, rows: int = 0, quick: bool = False,
        besides: Iterable[Demand] = (), micro_batches: Collection[int] = (1,),
    ) -> Profile:  # fmt: skip
        """The facts of `partitions` on `ranks` (None: all) with what `known` has besides. rows: of
        a global batch (0: those of the problem). quick: what is known already need not be exact.
        besides: further collectives that may be asked for. micro_batches: into how many a plan may
        cut a global batch."""

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        """What one of the ranks finds, on all of them; where it fails, on all."""
