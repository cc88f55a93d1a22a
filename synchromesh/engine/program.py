"""A program: what one rank runs of a traced step under one plan, component after component.

    leaves --> [component 0] --move/exchange--> [component 1] --> ... --> outputs

A border value is moved at most once to each (layout, placement) in which a later component wants
it, and dropped after its last reader. Backward is autograd's: moves and exchanges are autograd
functions.

Several micro-batches may be interleaved (values/schedule.py), so that one computes while a tensor
of another is under way between ranks:

    micro-batch 0   [c0] ~~~~~~ [c1] ~~~~~~ [c2]             [ ] computes, ~ is under way
    micro-batch 1        [c0] ~~~~~~ [c1] ~~~~~~ [c2]
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from synchromesh.engine import batches
from synchromesh.engine.absent import isolated
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.collectives import TensorAxis
from synchromesh.engine.exchange import Border, Exchange, depart
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.random import RandomStreams
from synchromesh.engine.walk import Walk, pauses, walking
from synchromesh.trace.partition.partition import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement
from synchromesh.values.schedule import Schedule, taking_turns

T = TypeVar("T")


@dataclass
class BoundComponent:
    """One component of the program, bound to this rank's tensors."""

    local: LocalComponent
    walk: Callable[..., Walk]
    fetches: tuple[Exchange, ...]
    results: tuple[Border, ...]
    dropped: tuple[Border, ...]  # forms that nobody reads after this component
    tensors: tuple[Tensor, ...]  # parameters, buffers and constants in argument order
    uses: tuple[
        tuple[int, str], ...
    ]  # (index in tensors, placement) where it is not the local one
    absent: Callable[..., Walk] | None = None  # `walk` where this rank has no rows, once needed

    def walk_of(self, rows: int) -> Callable[..., Walk]:
        """The walk for a block of so many rows."""
        if rows:
            return self.walk
        if self.absent is None:
            self.absent = walking(isolated(self.local.graph))
        return self.absent


@dataclass(frozen=True)
class RankOutputs:
    """What this rank computed of a micro-batch: outputs, and how many of its rows they cover."""

    names: tuple[str, ...]
    outputs: list[Tensor]
    rows: int  # 0: the outputs are of a row that is not this rank's own (engine/absent.py)
    leads: bool  # whether it is the first of the ranks that have the same outputs


class Program:
    """`run` computes the step's outputs on this rank; an idle rank has no program."""

    def __init__(
        self,
        step: Step,
        partition: Partition,
        groups: PlanGroups,
        tensors: Mapping[str, Tensor],
        holdings: Mapping[str, Holding],
        make_axis: Callable[[Layout, RandomStreams], TensorAxis],
        streams: RandomStreams,
    ) -> None:
        assert groups.position is not None, "an idle rank runs no program"
        self.step, self.partition, self.groups = step, partition, groups
        self.position = groups.position
        self.targets, self.coupled = step.targets, bool(step.coupled)
        self._make_axis, self._streams = make_axis, streams
        self.leaf_layout = partition.leaf_layout
        self._leaves = [(name, self.leaf_layout.tensor, REPLICATED) for name in step.leaves]
        self._parts = [self._bind(local, tensors, holdings) for local in partition.components]
        self._lanes: list[Lane] = []
        self._outputs = [self._output(o.value.name, o.placement) for o in partition.outputs]
        self._layout = max((layout for _, layout in self._outputs), key=lambda layout: layout.data)
        self._forget_early()
        self.turns = self._pauses() + 1  # of a forward

    def _bind(
        self, local: LocalComponent, tensors: Mapping[str, Tensor], holdings: Mapping[str, Holding]
    ) -> BoundComponent:
        fetches = []
        for item in local.inputs:
            made_by = None if item.source is None else self.partition.components[item.source]
            source = self.leaf_layout if made_by is None else made_by.layout
            fetches.append(Exchange(item.value, item.have, item.want, source, local.layout))
        names = (*local.parameters, *local.buffers)
        uses = []
        for index, name in enumerate(local.parameters):
            used = self.partition.placements.get((name, local.layout), REPLICATED)
            if holdings[name].home and local.layout.tensor > 1 and used.kind != "r":
                uses.append((index, str(used)))
        bound = [tensors[name] for name in names] + [
            self.step.constants[value.name] for value in local.constants
        ]
        results = tuple((o.value.name, local.layout.tensor, o.placement) for o in local.outputs)
        walk = walking(local.graph)
        return BoundComponent(local, walk, tuple(fetches), results, (), tuple(bound), tuple(uses))

    def _forget_early(self) -> None:
        """Notes for every form of a border value the last part that touches it."""
        last: dict[Border, int] = {}
        for index, part in enumerate(self._parts):
            for border in (
                *part.results,
                *(border for f in part.fetches for border in (f.made, f.read)),
            ):
                last[border] = index
        kept = {border for border, _ in self._outputs}
        for index, part in enumerate(self._parts):
            part.dropped = tuple(b for b, i in last.items() if i == index and b not in kept)

    def _pauses(self) -> int:
        """How often a forward pauses: at each value that is fetched, at each move of a graph."""
        count, there = 0, set(self._leaves)
        for part in self._parts:
            fetched = {fetch.read for fetch in part.fetches} - there
            count += len(fetched) + pauses(part.local.graph.graph)
            there = (there | fetched | set(part.results)) - set(part.dropped)
        return count

    def _output(self, name: str, placement: Placement) -> tuple[Border, Layout]:
        for part in self._parts:
            for border in part.results:
                if border[0] == name and border[2] == placement:
                    return border, part.local.layout
        raise AssertionError(f"no component gives out {name}")

    def run(
        self, micro_batches: Sequence[tuple[Any, GlobalRows]], step: int, first: int = 0
    ) -> list[RankOutputs]:
        """The step's outputs on this rank for each of the interleaved micro-batches.

        micro_batches: this rank's rows under `leaf_layout` (or one of another rank), and the rows
        of all ranks. step, first: name the draws of random operators; micro-batch i draws as
        first + i.
        """
        walks = [
            self._walk(batch, rows, self._lane(i, step, first))
            for i, (batch, rows) in enumerate(micro_batches)
        ]
        return run_forwards(walks, taking_turns(len(walks), self.turns))

    def backward(self) -> AbstractContextManager[None]:
        """What backward runs in: nothing is left to do (engine/opaque.py)."""
        return nullcontext()

    def after_backward(self, ran: bool) -> None:
        """Nothing either: every rank has run the same program."""

    def _lane(self, index: int, step: int, first: int) -> "Lane":
        while len(self._lanes) <= index:
            streams = self._streams.copy()
            axes = [self._make_axis(part.local.layout, streams) for part in self._parts]
            self._lanes.append(Lane(streams, axes))
        lane = self._lanes[index]
        lane.streams.begin(step, first, index)
        return lane

    def _walk(
        self, batch: Any, rows: GlobalRows, lane: "Lane"
    ) -> Generator[None, None, RankOutputs]:
        env: dict[Border, Tensor] = dict(zip(self._leaves, batches.leaves(batch), strict=True))
        for index, (part, axis) in enumerate(zip(self._parts, lane.axes, strict=True)):
            layout = part.local.layout
            data_index = layout.data_index(self.position)
            start, stop = rows.ranges(layout.data)[data_index]
            lane.streams.at(index, data_index, layout.tensor_index(self.position))
            axis.real_rows = stop - start
            for fetch in part.fetches:
                if fetch.read not in env:
                    env[fetch.read] = yield from self._fetch(fetch, axis, env[fetch.made], rows)
            inputs = [env[fetch.read] for fetch in part.fetches]
            tensors: Sequence[Tensor] = part.tensors
            if part.uses:
                tensors = list(tensors)
                for place, placement in part.uses:
                    tensors[place] = axis.move(tensors[place], "r", placement)
            walk = part.walk_of(stop - start)
            results = yield from walk(axis, max(1, stop - start), *inputs, *tensors)
            env.update(zip(part.results, results, strict=True))
            for border in part.dropped:
                env.pop(border, None)
        outputs = [env[border] for border, _ in self._outputs]
        return RankOutputs(self.step.outputs, outputs, *share(self._layout, self.position, rows))

    def _fetch(
        self, fetch: Exchange, axis: TensorAxis, x: Tensor, rows: GlobalRows
    ) -> Generator[None, None, Tensor]:
        if fetch.source.tensor == fetch.target.tensor:
            length = fetch.value.shape[fetch.have.dim] if fetch.have.sharded else 0
            return (yield from axis.moving(x, str(fetch.have), str(fetch.want), length))
        arrive = depart(x, fetch, self.groups, rows.ranges)
        yield
        return arrive()


@dataclass(frozen=True)
class Lane:
    """What one micro-batch has of its own: random streams, an axis for each component."""

    streams: RandomStreams
    axes: list[TensorAxis]


def run_forwards(walks: Sequence[Generator[None, None, T]], schedule: Schedule) -> list[T]:
    """Runs generators, one a micro-batch, from pause to pause in the order of the schedule's
    forwards; what they return."""
    results: dict[int, T] = {}
    for action in schedule.groups[0]:
        if action.kind == "F":
            try:
                next(walks[action.micro_batch])
            except StopIteration as end:
                results[action.micro_batch] = end.value
    return [results[i] for i in range(len(walks))]


def share(layout: Layout, position: int, rows: GlobalRows) -> tuple[int, bool]:
    """How many rows an output under `layout` covers at `position`, and whether that rank is the
    first of those that have it."""
    start, stop = rows.ranges(layout.data)[layout.data_index(position)]
    return stop - start, layout.tensor_index(position) == 0
