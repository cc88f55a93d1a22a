"""A stage bound to a rank's tensors: what each of its components computes with, what it fetches,
and which values nobody reads after it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from synchromesh.engine.absent import isolated
from synchromesh.programs.walk import Walk, pauses, walking
from synchromesh.trace import meta
from synchromesh.trace.nodes import all_arguments
from synchromesh.trace.partition.division import divided
from synchromesh.trace.partition.local import (
    LocalComponent,
    Output,
    Pair,
    Partition,
    exchange_of,
    shortened,
)
from synchromesh.trace.partition.sparse import sparse
from synchromesh.trace.step import Step
from synchromesh.values.exchange import Border, Exchange, border
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout, leaf_layout_at
from synchromesh.values.placement import REPLICATED


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
    # (index in tensors, placement) where it is not the local one
    uses: tuple[tuple[int, str], ...]
    place: tuple[int, int, int]  # data degree, this rank's data index and tensor index
    changed: tuple[int, ...]  # indices in tensors of buffers that it changes
    units: tuple[int, ...]  # of sharded parameters that it needs (values/sharding.py)
    # other walks, once needed, by whether there are rows, whether its backward is divided and
    # whether it is for backward
    others: dict[tuple[bool, bool, bool], Callable[..., Walk]] = field(default_factory=dict)

    def walk_of(
        self, rows: int, divides: bool = False, again: bool = False
    ) -> Callable[..., Walk]:
        """The walk for a block of so many rows; divides: that leaves the gradients of weights for
        later; again: as far as its backward needs."""
        if rows and not (divides or again):
            return self.walk
        key = rows > 0, divides, again
        if key not in self.others:
            graph = (self.local.graph if rows else isolated(self.local.graph)).graph
            graph = divided(self.local, graph) if divides else graph
            graph = shortened(graph) if again else graph
            self.others[key] = walking(torch.fx.GraphModule({}, graph))
        return self.others[key]


@dataclass
class BoundStage:
    """The components of a stage, and the values that it hands on."""

    parts: list[tuple[int, BoundComponent]]  # with their place in the chain
    arriving: tuple[Border, ...]
    handed: tuple[Border, ...]
    outputs: list[tuple[Border, Layout]]
    reports: dict[tuple[str, int], tuple[Border, Layout]]  # that it makes
    carry: dict[str, Border]  # leaves of the carry that it makes
    turns: int = 1  # of a forward


@dataclass(frozen=True)
class Binding:
    """What stages are bound to at one position.

    tensors, holdings: of the model, by name. crossings: what goes from stage to stage. needed: the
    units of sharded parameters that each component needs."""

    step: Step
    partition: Partition
    position: int
    tensors: Mapping[str, Tensor]
    holdings: Mapping[str, Holding]
    crossings: Mapping[Pair, tuple[Exchange, ...]]
    needed: tuple[tuple[int, ...], ...]

    @property
    def leaves(self) -> list[Border]:
        """The forms of the batch's leaves."""
        layout = leaf_layout_at(self.partition.leaf_layouts, self.position)
        return [border(name, layout, REPLICATED) for name in self.step.leaves]

    def stage(self, number: int, stage: range) -> BoundStage:
        """ValueError where an output is not made in the last stage."""
        parts = [(i, self._component(i)) for i in stage]
        last = stage[-1] == len(self.partition.components) - 1
        passing = [(way, item) for way, items in self.crossings.items() for item in items]
        arriving = (i.read if i.crosses else i.made for (_, to), i in passing if to == number)
        handed = (i.made for (source, _), i in passing if source == number)
        bound = BoundStage(
            parts, tuple(dict.fromkeys(arriving)), tuple(dict.fromkeys(handed)),
            [_output(parts, o) for o in self.partition.outputs] if last else [],
            self._reports(stage), self._carry(stage),
        )  # fmt: skip
        bound.turns = 1 + _arrange(bound, self.leaves)
        return bound

    def _reports(self, stage: range) -> dict[tuple[str, int], tuple[Border, Layout]]:
        components, made = self.partition.components, {}
        for item in self.partition.reports:
            if item.source in stage:
                layout = components[item.source].layout
                made[item.of] = border(item.value.name, layout, REPLICATED), layout
        return made

    def _carry(self, stage: range) -> dict[str, Border]:
        components = self.partition.components
        return {
            item.of: border(item.value.name, components[item.source].layout, REPLICATED)
            for item in self.partition.carry
            if item.source in stage
        }

    def _component(self, number: int) -> BoundComponent:
        local = sparse(self.partition.components[number], self._sparse)
        layout, names = local.layout, (*local.parameters, *local.buffers)
        fetches = tuple(exchange_of(self.partition, local, item) for item in local.inputs)
        constants = [self.step.constants[value.name] for value in local.constants]
        place = layout.data, layout.data_index(self.position), layout.tensor_index(self.position)
        return BoundComponent(
            local, walking(local.graph), tuple(fetch.read for fetch in fetches), fetches,
            tuple(border(o.value.name, layout, o.placement) for o in local.outputs), (),
            (*(self.tensors[name] for name in names), *constants), self._uses(local), place,
            tuple(i for i, name in enumerate(names) if name in self._changed),
            self.needed[number],
        )  # fmt: skip

    def _uses(self, local: LocalComponent) -> tuple[tuple[int, str], ...]:
        """The parameters that a component reads in another placement than they lie in."""
        if local.layout.tensor == 1:
            return ()
        placements = [
            (i, self.partition.placements.get((name, local.layout), REPLICATED))
            for i, name in enumerate(local.parameters)
            if self.holdings[name].partial_gradient
        ]
        return tuple((i, str(used)) for i, used in placements if used.kind != "r")

    @cached_property
    def _sparse(self) -> set[str]:
        """The names of parameters whose gradients stay sparse where the model asks for that."""
        assert self.step.graph is not None
        asked = (all_arguments(n)["weight"] for n in self.step.graph.nodes if meta.sparse(n))
        return {n for n in map(meta.name, asked) if n and self.holdings[n].own_gradient}

    @cached_property
    def _changed(self) -> set[str]:
        """The names of buffers that the step changes."""
        assert self.step.graph is not None
        return {name for node in self.step.graph.nodes for name in meta.effect(node)}


def _arrange(stage: BoundStage, leaves: list[Border]) -> int:
    """Notes with each component what it fetches and which forms nobody reads after it. How often
    a forward pauses: at each value that is fetched, at each move of a graph."""
    last: dict[Border, int] = {}
    for at, (_, part) in enumerate(stage.parts):
        read = (form for f in part.fetches for form in (f.made, f.read))
        last |= dict.fromkeys((*part.results, *read), at)
    given = (*stage.outputs, *stage.reports.values())
    kept = {*stage.handed, *(form for form, _ in given), *stage.carry.values()}
    count, there = 0, {*leaves, *stage.arriving}
    for at, (_, part) in enumerate(stage.parts):
        part.dropped = tuple(b for b, i in last.items() if i == at and b not in kept)
        fetched = {f.read: f for f in part.fetches if f.read not in there}
        part.fetches = tuple(fetched.values())
        count += len(fetched) + pauses(part.local.graph.graph)
        there = (there | set(fetched) | set(part.results)) - set(part.dropped)
    return count


def _output(parts: list[tuple[int, BoundComponent]], output: Output) -> tuple[Border, Layout]:
    for _, part in parts:
        form = border(output.value.name, part.local.layout, output.placement)
        if form in part.results:
            return form, part.local.layout
    raise ValueError(
        f"the output {output.value.name} is made in another stage than the last one: let the "
        "last stage begin with the component that makes it"
    )
