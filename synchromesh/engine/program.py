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
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.bound_stage import Binding, BoundComponent, BoundStage
from synchromesh.engine.exchange import depart
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.recomputation import Recomputation
from synchromesh.engine.sharding import Sharding, on_backward
from synchromesh.programs.collectives import GroupAxis
from synchromesh.programs.divided_backward import DividedBackward
from synchromesh.programs.random import RandomStreams
from synchromesh.programs.walk import Walk, run_forwards
from synchromesh.trace.capture.coupling import settled_buffers
from synchromesh.trace.capture.run import totals_of
from synchromesh.trace.partition.local import Partition, crossings, deliveries, flow
from synchromesh.trace.step import Step
from synchromesh.values.exchange import Border, Exchange
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, groups_of, leaf_layout_at, stages_of
from synchromesh.values.schedule import Action, taking_turns
from synchromesh.values.sharding import Run, gathering

# a value beside the loss: its name and part (`Step.reported`), itself, how many rows it covers
Report = tuple[tuple[str, int], Tensor, int]
# by schedule and number of micro-batches: after which backwards gradients are complete, of what
Completing = dict[tuple[str, int], dict[Action, list[str]]]


@dataclass(frozen=True)
class RankOutputs:
    """What this rank computed of a micro-batch: outputs, and how many of its rows they cover."""

    names: tuple[str, ...]
    outputs: list[Tensor]
    rows: int  # 0: the outputs are of a row that is not this rank's own (engine/absent.py)
    leads: bool  # whether it is the first of the ranks that have the same outputs
    reports: Sequence[Report] = ()  # of this stage, of which this rank is such a first one
    # leaves that this stage made, by name
    carry: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass
class ForwardResult:
    """What a forward of a micro-batch through one stage leaves for its backward.

    results: of each of the parts that took turns; outputs are the last stage's. arrived, made: by
    the form in which a value is there. divided: what is left for the gradients of weights, if they
    come later."""

    results: list[RankOutputs]
    arrived: Mapping[Border, Tensor]
    made: Mapping[Border, Tensor]
    states: "list[PieceState]"
    divided: DividedBackward | None = None


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
        assert step.graph is not None
        self._settled = {id(tensors[name]) for name in settled_buffers(step.graph)}
        self._of = 0, 1  # which of how many micro-batches runs
        self._divides = False  # whether the backward of the one that runs is divided
        # what it computes with instead of parameters, by their id (engine/stashed_weights.py)
        self.weights: Mapping[int, Tensor] = {}
        binding = Binding(
            step, partition, self.position, tensors, holdings, self.crossings,
            self._gathering.needed,
        )  # fmt: skip
        self._leaves = binding.leaves
        self._stages = {
            number: binding.stage(number, stage)
            for number, stage in enumerate(stages_of(layouts))
            if self.position in layouts[stage[0]].positions
        }
        self._free_states: list[PieceState] = []  # that are free
        self.completing: Completing = {}

    @property
    def group(self) -> int:
        """The group of devices that this rank is in."""
        return self.of[next(iter(self._stages))]

    @property
    def first_users(self) -> dict[str, tuple[int, int]]:
        """The stage and component of this rank that uses each parameter first."""
        users: dict[str, tuple[int, int]] = {}
        for number, stage in self._stages.items():
            for i, part in stage.parts:
                for name in part.local.parameters:
                    users.setdefault(name, (number, i))
        return users

    def run(
        self,
        micro_batches: Sequence[tuple[Any, GlobalRows]],
        step: int,
        first: int = 0,
        stage: int | None = None,
        arrived: Mapping[Border, Tensor] | None = None,
        of: tuple[int, int] = (0, 1),
        divides: bool = False,
    ) -> ForwardResult:
        """Forward through a stage (none: the only one) for each of the micro-batches that take
        turns.

        micro_batches: this rank's rows under `leaf_layout` (or one of another rank), and the rows
        of all ranks. step, first: name the draws of random operators; micro-batch i draws as
        first + i. arrived: values of earlier stages, for the one micro-batch that comes then. of:
        the place of these among the micro-batches of a step, and their number. divides: whether
        the gradients of weights come later than those of inputs."""
        self._of, self._divides = of, divides
        parts = self._stages[next(iter(self._stages)) if stage is None else stage]
        states = [self._piece_state(i, step, first) for i in range(len(micro_batches))]
        left = DividedBackward() if divides else None
        for piece in states:
            piece.leave_to(left)
        made: dict[Border, Tensor] = {}
        walks = [
            self._walk(parts, batch, rows, piece, arrived or {}, made, len(states))
            for (batch, rows), piece in zip(micro_batches, states, strict=True)
        ]
        results = run_forwards(walks, taking_turns(len(walks), parts.turns))
        return ForwardResult(results, arrived or {}, made, states, left)

    def gathered(self, action: Action) -> Run:
        """The components of an action that need sharded parameters, in the order in which they
        run."""
        stage = (i for i, _ in self._stages[action.stage].parts)
        return self._gathering.run(stage, action.kind == "B")

    def end(self, forward: ForwardResult) -> None:
        """Its backward is over: what the forward used is free for another one."""
        self._free_states += forward.states
        forward.states = []

    def backward(self) -> AbstractContextManager[None]:
        """What backward runs in: nothing is left to do (engine/opaque.py)."""
        return nullcontext()

    def after_backward(self, ran: bool) -> None:
        """Nothing either: every rank has run the same program."""

    def _piece_state(self, index: int, step: int, first: int) -> "PieceState":
        if not self._free_states:
            streams = self._streams.copy()
            self._free_states.append(PieceState(streams, {
                i: self._make_axis(part.local.layout, streams)
                for stage in self._stages.values()
                for i, part in stage.parts
            }))  # fmt: skip
        piece = self._free_states.pop()
        piece.streams.begin(step, first, index)
        return piece

    def _walk(
        self, stage: BoundStage, batch: Any, rows: GlobalRows, piece: "PieceState",
        arrived: Mapping[Border, Tensor], made: dict[Border, Tensor], turns: int,
    ) -> Generator[None, None, RankOutputs]:  # fmt: skip
        env: dict[Border, Tensor] = dict(zip(self._leaves, batches.leaves(batch), strict=True))
        env.update(arrived)
        blocks: dict[int, tuple[int, int]] = {}  # this rank's rows, by data degree
        for index, part in stage.parts:
            data, data_index, _ = part.place
            if data not in blocks:
                blocks[data] = rows.ranges(data)[data_index]
            start, stop = blocks[data]
            piece.at(index, part, stop - start)
            for fetch in part.fetches:
                x = env[fetch.made]
                env[fetch.read] = yield from self._fetch(fetch, piece.axes[index], x, rows)
            inputs = [env[form] for form in part.reads]
            results = yield from self._compute(index, part, piece, inputs, stop - start, turns)
            env.update(zip(part.results, results, strict=True))
            for form in part.dropped:
                env.pop(form, None)
        made.update((form, env[form]) for form in stage.handed)
        outputs = [env[form] for form, _ in stage.outputs]
        finest = max((x for _, x in stage.outputs), key=lambda x: x.data, default=None)
        covers = (0, False) if finest is None else share(finest, self.position, rows)
        carry = {leaf: env[form] for leaf, form in stage.carry.items()}
        reports = self._reports(stage, env, rows) if stage.reports else ()
        return RankOutputs(self.step.outputs, outputs, *covers, reports, carry)

    def _reports(
        self, stage: BoundStage, env: Mapping[Border, Tensor], rows: GlobalRows
    ) -> list[Report]:
        made = []
        for of, (form, layout) in stage.reports.items():
            covered, leads = share(layout, self.position, rows)
            if covered and leads:
                made.append((of, env[form], covered))
        return made

    def _compute(
        self, index: int, part: BoundComponent, piece: "PieceState", inputs: Sequence[Tensor],
        rows: int, turns: int,
    ) -> Generator[None, None, Sequence[Tensor]]:  # fmt: skip
        """The results of a component for a block of `rows` rows."""
        axis, leaves = piece.axes[index], any(x.requires_grad for x in inputs)
        if part.units:
            self.sharding.enter(index, turns)
            inputs = on_backward(inputs, partial(self.sharding.leave, index, turns))
        tensors = [self.weights.get(id(x), x) for x in part.tensors]
        for place, placement in part.uses:
            tensors[place] = axis.move(tensors[place], "r", placement)
        # backward reads what a buffer was, also when the next micro-batch has changed it
        copied = part.changed if self._of[1] > 1 else ()
        for place in copied:
            tensors[place] = tensors[place].clone()
        walk = part.walk_of(rows, self._divides)(axis, max(1, rows), *inputs, *tensors)
        if part.local.layout.recompute and torch.is_grad_enabled():
            at = partial(piece.at, index, part, rows)
            walk = self._recomputation(part, axis, rows, inputs, tensors, at).watched(walk)
        results: Sequence[Tensor] = yield from walk
        for place in copied:
            kept = part.tensors[place]  # what all would make the same changes once
            if self._of[0] + 1 == self._of[1] or id(kept) not in self._settled:
                kept.copy_(tensors[place])
        return self._left(index, part.units, results, turns, leaves) if part.units else results

    def _recomputation(
        self, part: BoundComponent, axis: GroupAxis, rows: int, inputs: Sequence[Tensor],
        tensors: Sequence[Tensor], at: Callable[[], None],
    ) -> Recomputation:  # fmt: skip
        """A second walk, in backward, which draws what the first one draws and changes no buffer.
        at: names the place of its draws."""
        before = {i: tensors[i].clone() for i in part.changed}
        walk = part.walk_of(rows, self._divides, again=True)

        def again() -> Walk:
            at()
            copies = {i: x.clone() for i, x in before.items()}
            own = (copies.get(i, x) for i, x in enumerate(tensors))
            return walk(axis, max(1, rows), *inputs, *own)

        staying = [x for i, x in enumerate(tensors) if i not in before]
        return Recomputation(again, [*inputs, *staying])

    def _left(
        self,
        index: int,
        units: tuple[int, ...],
        results: Sequence[Tensor],
        turns: int,
        leaves: bool,
    ) -> tuple[Tensor, ...]:
        """The results of a component whose parameters may be freed, and are there again in its
        backward."""
        own = [x.clone() if self.sharding.owned(units, x) else x for x in results]
        self.sharding.leave(index, turns)
        return tuple(on_backward(own, partial(self.sharding.enter, index, turns, leaves)))

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
class PieceState:
    """What one piece has of its own: random streams, an axis for each component."""

    streams: RandomStreams
    axes: Mapping[int, GroupAxis]  # by place in the chain

    def leave_to(self, left: DividedBackward | None) -> None:
        """What divided graphs leave for later goes there."""
        for axis in self.axes.values():
            axis.divided = left

    def at(self, index: int, part: BoundComponent, rows: int) -> None:
        """Comes to a component, which computes `rows` rows of this rank's own."""
        _, data_index, tensor_index = part.place
        self.streams.at(index, data_index, tensor_index)
        self.axes[index].real_rows = rows


def share(layout: Layout, position: int, rows: GlobalRows) -> tuple[int, bool]:
    """How many rows an output under `layout` covers at `position`, and whether that rank is the
    first of those that have it."""
    start, stop = rows.ranges(layout.data)[layout.data_index(position)]
    return stop - start, layout.tensor_index(position) == 0
