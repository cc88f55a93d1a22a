"""A program: what one rank runs of a traced step under one plan, component after component.

    leaves --> [component 0] --move/exchange--> [component 1] --> ... --> outputs

A border value is moved at most once to each (layout, placement) in which a later component wants
it, and dropped after its last reader. Backward is autograd's: moves and exchanges are autograd
functions. A rank runs the components of its stages alone; what it has of other stages' values,
and hands to them, is a `ForwardResult`.

Several micro-batches may take turns (values/schedule.py), so that one computes while a tensor of
another is under way between ranks:

    micro-batch 0   [c0] ~~~~~~ [c1] ~~~~~~ [c2]             [ ] computes, ~ is under way
    micro-batch 1        [c0] ~~~~~~ [c1] ~~~~~~ [c2]"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine import batches
from synchromesh.engine.absent import isolated
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.exchange import depart
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.recomputation import Recomputation
from synchromesh.engine.sharding import Sharding, signal
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.random import RandomStreams
from synchromesh.programs.walk import Walk, pauses, run_forwards, walking
from synchromesh.trace import meta
from synchromesh.trace.capture.coupling import settled_buffers
from synchromesh.trace.capture.run import totals_of
from synchromesh.trace.partition.crossings import crossings, deliveries, exchange_of
from synchromesh.trace.partition.local import LocalComponent, Output, Partition, flow, shortened
from synchromesh.trace.step import Step
from synchromesh.values.exchange import Border, Exchange, border
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, groups_of, leaf_layout_at, stages_of
from synchromesh.values.placement import REPLICATED
from synchromesh.values.schedule import Action, taking_turns
from synchromesh.values.sharding import Run, gathering

# by schedule and number of micro-batches: after which backwards gradients are complete, of what
Completing = dict[tuple[str, int], dict[Action, list[str]]]


@dataclass
class BoundComponent:
    """One component of the program, bound to this rank's tensors."""

    local: LocalComponent
    walk: Callable[..., Walk]
    reads: tuple[Border, ...]  # its inputs
    fetches: tuple[Exchange, ...]  # of the inputs: those that nobody has fetched before it
    results: tuple[Border, ...]
    dropped: tuple[Border, ...]  # forms that nobody reads after this component
    tensors: tuple[Tensor, ...]  # parameters, buffers and constants in argument order
    uses: tuple[
        tuple[int, str], ...
    ]  # (index in tensors, placement) where it is not the local one
    place: tuple[int, int, int]  # data degree, this rank's data index and tensor index
    changed: tuple[int, ...]  # indices in tensors of buffers that it changes
    units: tuple[int, ...]  # of sharded parameters that it needs (values/sharding.py)
    # other walks, once needed, by whether there are rows and whether it is for backward
    others: dict[tuple[bool, bool], Callable[..., Walk]] = field(default_factory=dict)

    def walk_of(self, rows: int, again: bool = False) -> Callable[..., Walk]:
        """The walk for a block of so many rows; again: as far as its backward needs."""
        if rows and not again:
            return self.walk
        key = rows > 0, again
        if key not in self.others:
            graph = self.local.graph if rows else isolated(self.local.graph)
            if again:
                graph = torch.fx.GraphModule({}, shortened(graph.graph))
            self.others[key] = walking(graph)
        return self.others[key]


@dataclass(frozen=True)
class RankOutputs:
    """What this rank computed of a micro-batch: outputs, and how many of its rows they cover."""

    names: tuple[str, ...]
    outputs: list[Tensor]
    rows: int  # 0: the outputs are of a row that is not this rank's own (engine/absent.py)
    leads: bool  # whether it is the first of the ranks that have the same outputs
    carry: Mapping[str, Tensor] = field(
        default_factory=dict
    )  # leaves that this stage made, by name


@dataclass
class ForwardResult:
    """What a forward of a micro-batch through one stage leaves for its backward.

    results: of each of the parts that took turns; outputs are the last stage's. arrived, made: by
    the form in which a value is there."""

    results: list[RankOutputs]
    arrived: Mapping[Border, Tensor]
    made: Mapping[Border, Tensor]
    lanes: "list[Lane]"


@dataclass
class StageParts:
    """The components of a stage, bound to this rank's tensors, and the values that it hands on."""

    parts: list[tuple[int, BoundComponent]]  # with their place in the chain
    arriving: tuple[Border, ...]
    handed: tuple[Border, ...]
    outputs: list[tuple[Border, Layout]]
    carry: dict[str, Border]  # leaves of the carry that it makes
    turns: int = 1  # of a forward


class Program:
    """What this rank runs of the step; an idle rank has no program.

    of: the group of devices of each stage. crossings: what goes from stage to stage. deliveries:
    where the carry goes."""

    def __init__(
        self,
        step: Step,
        partition: Partition,
        groups: PlanGroups,
        tensors: Mapping[str, Tensor],
        holdings: Mapping[str, Holding],
        make_axis: Callable[[Layout, RandomStreams], GroupAxis],
        streams: RandomStreams,
        sharding: Sharding | None = None,
    ) -> None:
        assert groups.position is not None, "an idle rank runs no program"
        self.step, self.partition, self.groups = step, partition, groups
        self.sharding = sharding or Sharding()
        self._gathering = gathering(self.sharding.units, map(flow, partition.components))
        self.position = groups.position
        self.coupled, self.totals = bool(step.coupled), totals_of(step)
        self._make_axis, self._streams = make_axis, streams
        layouts = [local.layout for local in partition.components]
        self.of = groups_of(layouts)
        self.crossings, self.deliveries = crossings(partition), deliveries(partition)
        self.leaf_layout = leaf_layout_at(partition.leaf_layouts, self.position)
        self._leaves = [border(name, self.leaf_layout, REPLICATED) for name in step.leaves]
        assert step.graph is not None
        self._changed = {name for node in step.graph.nodes for name in meta.effect(node)}
        self._settled = {id(tensors[name]) for name in settled_buffers(step.graph)}
        self._of = 0, 1  # which of how many micro-batches runs
        self._stages = {
            number: self._stage(number, stage, tensors, holdings)
            for number, stage in enumerate(stages_of(layouts))
            if self.position in layouts[stage[0]].positions
        }
        self._lanes: list[Lane] = []  # that are free
        self.completing: Completing = {}

    @property
    def group(self) -> int:
        """The group of devices that this rank is in."""
        return self.of[next(iter(self._stages))]

    @property
    def first_users(self) -> dict[str, tuple[int, int]]:
        """The stage and component of this rank that uses each parameter first."""
        found: dict[str, tuple[int, int]] = {}
        for number, stage in self._stages.items():
            for i, part in stage.parts:
                for name in part.local.parameters:
                    found.setdefault(name, (number, i))
        return found

    def _stage(
        self, number: int, stage: range, tensors: Mapping[str, Tensor],
        holdings: Mapping[str, Holding],
    ) -> StageParts:  # fmt: skip
        bound = [(i, self._bind(i, tensors, holdings)) for i in stage]
        arriving, handed = dict[Border, None](), dict[Border, None]()
        for (source, target), items in self.crossings.items():
            if target == number:
                arriving |= {i.read if i.crosses else i.made: None for i in items}
            if source == number:
                handed |= {i.made: None for i in items}
        outputs = []
        if stage[-1] == len(self.partition.components) - 1:
            outputs = [self._output(bound, o) for o in self.partition.outputs]
        carry = {
            item.leaf: border(
                item.value.name, self.partition.components[item.source].layout, REPLICATED
            )
            for item in self.partition.carry
            if item.source in stage
        }
        made = StageParts(bound, tuple(arriving), tuple(handed), outputs, carry)
        made.turns = 1 + self._arrange(made)
        return made

    def _bind(
        self, number: int, tensors: Mapping[str, Tensor], holdings: Mapping[str, Holding]
    ) -> BoundComponent:
        local = self.partition.components[number]
        fetches = tuple(exchange_of(self.partition, local, item) for item in local.inputs)
        names = (*local.parameters, *local.buffers)
        uses = []
        for index, name in enumerate(local.parameters):
            used = self.partition.placements.get((name, local.layout), REPLICATED)
            if holdings[name].partial_gradient and local.layout.tensor > 1 and used.kind != "r":
                uses.append((index, str(used)))
        bound = [tensors[name] for name in names] + [
            self.step.constants[value.name] for value in local.constants
        ]
        results = tuple(border(o.value.name, local.layout, o.placement) for o in local.outputs)
        layout, position = local.layout, self.position
        place = layout.data, layout.data_index(position), layout.tensor_index(position)
        walk = walking(local.graph)
        changed = tuple(i for i, name in enumerate(names) if name in self._changed)
        return BoundComponent(
            local, walk, tuple(fetch.read for fetch in fetches), fetches, results, (),
            tuple(bound), tuple(uses), place, changed, self._gathering.needed[number],
        )  # fmt: skip

    def _arrange(self, stage: StageParts) -> int:
        """Notes with each component what it fetches and which forms nobody reads after it. How
        often a forward pauses: at each value that is fetched, at each move of a graph."""
        last: dict[Border, int] = {}
        for at, (_, part) in enumerate(stage.parts):
            read = (form for f in part.fetches for form in (f.made, f.read))
            last |= dict.fromkeys((*part.results, *read), at)
        kept = {*stage.handed, *(form for form, _ in stage.outputs), *stage.carry.values()}
        count, there = 0, {*self._leaves, *stage.arriving}
        for at, (_, part) in enumerate(stage.parts):
            part.dropped = tuple(b for b, i in last.items() if i == at and b not in kept)
            fetched = {f.read: f for f in part.fetches if f.read not in there}
            part.fetches = tuple(fetched.values())
            count += len(fetched) + pauses(part.local.graph.graph)
            there = (there | set(fetched) | set(part.results)) - set(part.dropped)
        return count

    def _output(
        self, parts: Sequence[tuple[int, BoundComponent]], output: Output
    ) -> tuple[Border, Layout]:
        for _, part in parts:
            form = border(output.value.name, part.local.layout, output.placement)
            if form in part.results:
                return form, part.local.layout
        raise ValueError(
            f"the output {output.value.name} is made in another stage than the last one: let the "
            "last stage begin with the component that makes it"
        )

    def run(
        self,
        micro_batches: Sequence[tuple[Any, GlobalRows]],
        step: int,
        first: int = 0,
        stage: int | None = None,
        arrived: Mapping[Border, Tensor] | None = None,
        of: tuple[int, int] = (0, 1),
    ) -> ForwardResult:
        """Forward through a stage (none: the only one) for each of the micro-batches that take
        turns.

        micro_batches: this rank's rows under `leaf_layout` (or one of another rank), and the rows
        of all ranks. step, first: name the draws of random operators; micro-batch i draws as
        first + i. arrived: values of earlier stages, for the one micro-batch that comes then. of:
        the place of these among the micro-batches of a step, and their number."""
        self._of = of
        parts = self._stages[next(iter(self._stages)) if stage is None else stage]
        lanes = [self._lane(i, step, first) for i in range(len(micro_batches))]
        made: dict[Border, Tensor] = {}
        walks = [
            self._walk(parts, batch, rows, lane, arrived or {}, made, len(lanes))
            for (batch, rows), lane in zip(micro_batches, lanes, strict=True)
        ]
        results = run_forwards(walks, taking_turns(len(walks), parts.turns))
        return ForwardResult(results, arrived or {}, made, lanes)

    def gathered(self, action: Action) -> Run:
        """The components of an action that need sharded parameters, in the order in which they
        run."""
        stage = (i for i, _ in self._stages[action.stage].parts)
        return self._gathering.run(stage, action.kind == "B")

    def end(self, forward: ForwardResult) -> None:
        """Its backward is over: what the forward used is free for another one."""
        self._lanes += forward.lanes
        forward.lanes = []

    def backward(self) -> AbstractContextManager[None]:
        """What backward runs in: nothing is left to do (engine/opaque.py)."""
        return nullcontext()

    def after_backward(self, ran: bool) -> None:
        """Nothing either: every rank has run the same program."""

    def _lane(self, index: int, step: int, first: int) -> "Lane":
        if not self._lanes:
            streams = self._streams.copy()
            self._lanes.append(Lane(streams, {
                i: self._make_axis(part.local.layout, streams)
                for stage in self._stages.values()
                for i, part in stage.parts
            }))  # fmt: skip
        lane = self._lanes.pop()
        lane.streams.begin(step, first, index)
        return lane

    def _walk(
        self, stage: StageParts, batch: Any, rows: GlobalRows, lane: "Lane",
        arrived: Mapping[Border, Tensor], made: dict[Border, Tensor], turns: int,
    ) -> Generator[None, None, RankOutputs]:  # fmt: skip
        env: dict[Border, Tensor] = dict(zip(self._leaves, batches.leaves(batch), strict=True))
        env.update(arrived)
        blocks: dict[int, tuple[int, int]] = {}  # this rank's rows, by data degree
        for index, part in stage.parts:
            axis, (data, data_index, tensor_index) = lane.axes[index], part.place
            if data not in blocks:
                blocks[data] = rows.ranges(data)[data_index]
            start, stop = blocks[data]
            at = partial(lane.streams.at, index, data_index, tensor_index)
            at()
            axis.real_rows = stop - start
            for fetch in part.fetches:
                env[fetch.read] = yield from self._fetch(fetch, axis, env[fetch.made], rows)
            inputs = [env[form] for form in part.reads]
            ends = any(x.requires_grad for x in inputs)
            if part.units:
                self.sharding.enter(index, turns)
                inputs = signal(inputs, partial(self.sharding.leave, index, turns))
            tensors = list(part.tensors)
            for place, placement in part.uses:
                tensors[place] = axis.move(tensors[place], "r", placement)
            # backward reads what a buffer was, also when the next micro-batch has changed it
            copied = part.changed if self._of[1] > 1 else ()
            for place in copied:
                tensors[place] = tensors[place].clone()
            count = stop - start
            walk = part.walk_of(count)(axis, max(1, count), *inputs, *tensors)
            if part.local.layout.recompute and torch.is_grad_enabled():
                second = self._recomputation(part, axis, count, inputs, tensors, at)
                walk = second.watched(walk)
            results = yield from walk
            for place in copied:
                kept = part.tensors[place]  # what all would make the same changes once
                if self._of[0] + 1 == self._of[1] or id(kept) not in self._settled:
                    kept.copy_(tensors[place])
            if part.units:
                results = self._left(index, part.units, results, turns, ends)
            env.update(zip(part.results, results, strict=True))
            for form in part.dropped:
                env.pop(form, None)
        made.update((form, env[form]) for form in stage.handed)
        outputs = [env[form] for form, _ in stage.outputs]
        finest = max((x for _, x in stage.outputs), key=lambda x: x.data, default=None)
        covers = (0, False) if finest is None else share(finest, self.position, rows)
        carry = {leaf: env[form] for leaf, form in stage.carry.items()}
        return RankOutputs(self.step.outputs, outputs, *covers, carry)

    def _recomputation(
        self, part: BoundComponent, axis: GroupAxis, rows: int, inputs: Sequence[Tensor],
        tensors: Sequence[Tensor], at: Callable[[], None],
    ) -> Recomputation:  # fmt: skip
        """A second walk, in backward, which draws what the first one draws and changes no buffer.
        at: names the place of its draws."""
        before = {i: tensors[i].clone() for i in part.changed}
        walk = part.walk_of(rows, again=True)

        def again() -> Walk:
            at()
            copies = {i: x.clone() for i, x in before.items()}
            own = (copies.get(i, x) for i, x in enumerate(tensors))
            return walk(axis, max(1, rows), *inputs, *own)

        staying = [x for i, x in enumerate(tensors) if i not in before]
        return Recomputation(again, [*inputs, *staying])

    def _left(
        self, index: int, units: tuple[int, ...], results: Sequence[Tensor], turns: int, ends: bool
    ) -> tuple[Tensor, ...]:
        """The results of a component whose parameters may be freed, and are there again in its
        backward."""
        own = [x.clone() if self.sharding.owned(units, x) else x for x in results]
        self.sharding.leave(index, turns)
        return tuple(signal(own, partial(self.sharding.enter, index, turns, ends)))

    def _fetch(
        self, fetch: Exchange, axis: GroupAxis, x: Tensor, rows: GlobalRows
    ) -> Generator[None, None, Tensor]:
        if fetch.source.mesh == fetch.target.mesh:
            length = fetch.value.shape[fetch.have.dim] if fetch.have.sharded else 0
            return (yield from axis.moving(x, str(fetch.have), str(fetch.want), length))
        arrive = depart(x, fetch, self.groups, rows.ranges)
        yield
        return arrive()


@dataclass(frozen=True)
class Lane:
    """What one micro-batch has of its own: random streams, an axis for each component."""

    streams: RandomStreams
    axes: Mapping[int, GroupAxis]  # by place in the chain


def share(layout: Layout, position: int, rows: GlobalRows) -> tuple[int, bool]:
    """How many rows an output under `layout` covers at `position`, and whether that rank is the
    first of those that have it."""
    start, stop = rows.ranges(layout.data)[layout.data_index(position)]
    return stop - start, layout.tensor_index(position) == 0
