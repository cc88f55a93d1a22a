"""A program: what one rank runs of a traced step under one plan, component after component.

    leaves --> [component 0] --move/exchange--> [component 1] --> ... --> outputs

A border value is moved at most once to each (layout, placement) in which a later component wants
it, and dropped after its last reader. Backward is autograd's: moves and exchanges are autograd
functions.

A batch may be cut into pieces that walk through the components side by side, so that one computes
while another is under way between ranks; whoever waits lets the others go on:

    piece 0   [c0] ~~~~~~ [c1] ~~~~~~ [c2]             [ ] computes, ~ is under way
    piece 1        [c0] ~~~~~~ [c1] ~~~~~~ [c2]
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from synchromesh.engine import batches
from synchromesh.engine.absent import isolated
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.collectives import Axis
from synchromesh.engine.exchange import depart
from synchromesh.engine.random import Streams
from synchromesh.engine.stage import Stage
from synchromesh.engine.walk import Walk, walking
from synchromesh.trace.partition.partition import LocalComponent, Partition
from synchromesh.trace.step import Step
from synchromesh.values.component import Value
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement

T = TypeVar("T")
Border = tuple[
    str, int, Placement
]  # value, tensor degree, placement: one form of a value on this rank


@dataclass(frozen=True)
class Fetch:
    """One input of a component: the form it has, the form it is wanted in."""

    value: Value
    have: Border
    want: Border
    source: Layout
    target: Layout


@dataclass
class Part:
    """One component of the program, bound to this rank's tensors."""

    local: LocalComponent
    walk: Callable[
        ..., Walk
    ]  # the local graph as a generator that pauses while its moves are under way
    fetches: tuple[Fetch, ...]
    results: tuple[Border, ...]
    dropped: tuple[Border, ...]  # forms that nobody reads after this component
    tensors: tuple[Tensor, ...]  # parameters, buffers and constants in argument order
    uses: tuple[
        tuple[int, str], ...
    ]  # (index in tensors, placement) of tensors that are held otherwise
    absent: Callable[..., Walk] | None = None  # `walk` where this rank has no rows, once needed

    def walk_of(self, rows: int) -> Callable[..., Walk]:
        """The walk for a block of so many rows."""
        if rows:
            return self.walk
        if self.absent is None:
            self.absent = walking(isolated(self.local.graph))
        return self.absent


@dataclass(frozen=True)
class Result:
    """What a run gives this rank: outputs, how many of the batch's rows they cover, whether it
    speaks for them."""

    names: tuple[str, ...]
    outputs: list[Tensor]
    rows: int  # 0: what was computed is not to be told (engine/absent.py)
    leads: bool  # the first of the ranks that hold the same outputs


class Program:
    """`run(batch, rows)` computes the step's outputs on this rank; an idle rank has no program."""

    def __init__(
        self,
        step: Step,
        partition: Partition,
        stage: Stage,
        tensors: Mapping[str, Tensor],
        held: Mapping[str, Holding],
        make_axis: Callable[[Layout, Streams], Axis],
        streams: Streams,
    ) -> None:
        assert stage.position is not None, "an idle rank runs no program"
        self.step, self.partition, self.stage = step, partition, stage
        self.position = stage.position
        self.targets, self.coupled = step.targets, bool(step.coupled)
        self._make_axis, self._streams = make_axis, streams
        layouts = [c.layout for c in partition.components]
        self.leaf_layout = leaf_layout(layouts)
        self._leaves = [(name, self.leaf_layout.tensor, REPLICATED) for name in step.leaves]
        self._parts = [self._part(local, tensors, held) for local in partition.components]
        self._lanes: list[Lane] = []
        self._outputs = [self._output(o.value.name, o.placement) for o in partition.outputs]
        self._layout = max((layout for _, layout in self._outputs), key=lambda layout: layout.data)
        self._forget_early()

    def _part(
        self, local: LocalComponent, tensors: Mapping[str, Tensor], held: Mapping[str, Holding]
    ) -> Part:
        fetches = []
        for item in local.inputs:
            made_by = None if item.source is None else self.partition.components[item.source]
            source = self.leaf_layout if made_by is None else made_by.layout
            have = (item.value.name, source.tensor, item.have)
            want = (item.value.name, local.layout.tensor, item.want)
            fetches.append(Fetch(item.value, have, want, source, local.layout))
        names = (*local.parameters, *local.buffers)
        uses = []
        for index, name in enumerate(local.parameters):
            used = self.partition.placements.get((name, local.layout), REPLICATED)
            if held[name].home and local.layout.tensor > 1 and used.kind != "r":
                uses.append((index, str(used)))
        bound = [tensors[name] for name in names] + [
            self.step.constants[value.name] for value in local.constants
        ]
        results = tuple((o.value.name, local.layout.tensor, o.placement) for o in local.outputs)
        walk = walking(local.graph)
        return Part(local, walk, tuple(fetches), results, (), tuple(bound), tuple(uses))

    def _forget_early(self) -> None:
        """Notes for every form of a border value the last part that touches it."""
        last: dict[Border, int] = {}
        for index, part in enumerate(self._parts):
            for border in (
                *part.results,
                *(f.have for f in part.fetches),
                *(f.want for f in part.fetches),
            ):
                last[border] = index
        kept = {border for border, _ in self._outputs}
        for index, part in enumerate(self._parts):
            part.dropped = tuple(b for b, i in last.items() if i == index and b not in kept)

    def _output(self, name: str, placement: Placement) -> tuple[Border, Layout]:
        for part in self._parts:
            for border in part.results:
                if border[0] == name and border[2] == placement:
                    return border, part.local.layout
        raise AssertionError(f"no component gives out {name}")

    def run(
        self, pieces: Sequence[tuple[Any, GlobalRows]], step: int, turn: int = 0
    ) -> list[Result]:
        """The step's outputs on this rank, for each piece of its batch.

        pieces: this rank's rows under `leaf_layout` (or one that is lent), and the rows of all
        ranks. step, turn: name the draw of random operators; piece i draws as turn + i.
        """
        return in_turns(
            [
                self._walk(batch, rows, self._lane(i, step, turn))
                for i, (batch, rows) in enumerate(pieces)
            ]
        )

    def backward(self) -> AbstractContextManager[None]:
        """What backward runs in: nothing is left to do (engine/opaque.py)."""
        return nullcontext()

    def after_backward(self, ran: bool) -> None:
        """Nothing either: every rank has run the same program."""

    def _lane(self, index: int, step: int, turn: int) -> "Lane":
        while len(self._lanes) <= index:
            streams = self._streams.copy()
            axes = [self._make_axis(part.local.layout, streams) for part in self._parts]
            self._lanes.append(Lane(streams, axes))
        lane = self._lanes[index]
        lane.streams.begin(step, turn, index)
        return lane

    def _walk(self, batch: Any, rows: GlobalRows, lane: "Lane") -> Generator[None, None, Result]:
        env: dict[Border, Tensor] = dict(zip(self._leaves, batches.leaves(batch), strict=True))
        for index, (part, axis) in enumerate(zip(self._parts, lane.axes, strict=True)):
            layout = part.local.layout
            data_index = layout.data_index(self.position)
            start, stop = rows.ranges(layout.data)[data_index]
            lane.streams.at(index, data_index, layout.tensor_index(self.position))
            axis.real_rows = stop - start
            for fetch in part.fetches:
                if fetch.want not in env:
                    env[fetch.want] = yield from self._fetch(fetch, axis, env[fetch.have], rows)
            inputs = [env[fetch.want] for fetch in part.fetches]
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
        return Result(self.step.outputs, outputs, *share(self._layout, self.position, rows))

    def _fetch(
        self, fetch: Fetch, axis: Axis, x: Tensor, rows: GlobalRows
    ) -> Generator[None, None, Tensor]:
        have, want = fetch.have[2], fetch.want[2]
        if fetch.source.tensor == fetch.target.tensor:
            return (yield from axis.moving(x, str(have), str(want)))
        arrive = depart(
            x, fetch.value, have, want, fetch.source, fetch.target, self.stage,
            rows.ranges(fetch.source.data), rows.ranges(fetch.target.data),
        )  # fmt: skip
        yield
        return arrive()


@dataclass(frozen=True)
class Lane:
    """What one piece of a batch has of its own: random streams, an axis for each component."""

    streams: Streams
    axes: list[Axis]


def in_turns(walks: Sequence[Generator[None, None, T]]) -> list[T]:
    """Runs generators side by side, each up to its next pause; what they return."""
    results: dict[int, T] = {}
    while len(results) < len(walks):
        for index, walk in enumerate(walks):
            if index not in results:
                try:
                    next(walk)
                except StopIteration as end:
                    results[index] = end.value
    return [results[i] for i in range(len(walks))]


def leaf_layout(layouts: Sequence[Layout]) -> Layout:
    """How a batch's rows lie over a stage: by the largest data degree of its components."""
    data = max(layout.data for layout in layouts)
    return Layout(data, layouts[0].devices // data)


def share(layout: Layout, position: int, rows: GlobalRows) -> tuple[int, bool]:
    """How many rows an output under `layout` covers at `position`, and whether that rank speaks
    for them."""
    start, stop = rows.ranges(layout.data)[layout.data_index(position)]
    return stop - start, layout.tensor_index(position) == 0
