"""The local graphs: every operator with its chosen states, moves written in where states differ.

A move stands before its first reader and serves all readers of that state in the component:

    linear = torch.ops.aten.linear.default(input_r, weight, bias)      x in r, weight in S(0)
    ...
    add = torch.ops.aten.add.Tensor(linear_1, bias_P)                  partial
    add_R = axis.move(add, 'P', 'R')                                   the all-reduce
"""

from operator import getitem
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from synchromesh.trace.capture.effects import dependent_on_rows
from synchromesh.trace.partition.analysis import Tensor, Work, origin, reads, value_of, values_of
from synchromesh.trace.partition.draft import Assignment, Draft
from synchromesh.trace.partition.edges import edge_collectives
from synchromesh.trace.partition.local import (
    Communication,
    Computation,
    Event,
    Input,
    LocalComponent,
    Output,
    Partition,
)
from synchromesh.trace.partition.moves import move_collectives
from synchromesh.trace.partition.reasons import why_whole
from synchromesh.trace.rules import draws
from synchromesh.trace.rules.operator import Emit, arguments
from synchromesh.values.placement import REPLICATED as R
from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective

Form = tuple[Tensor, int, Placement]  # a value under a tensor degree in one state


class Traffic:
    """Which forms of which values every component reads, and what crosses borders."""

    def __init__(self, draft: Draft, chosen: Assignment) -> None:
        self.draft, self.chosen = draft, chosen
        assert draft.step.graph is not None
        self.of_rows = dependent_on_rows(draft.step.graph)
        self.made: dict[Tensor, Placement] = {}
        self.inside: dict[Form, set[int]] = {}  # read by the component that makes it
        self.live: set[Form] = set()  # read by something through which a gradient flows
        for work, choices in zip(draft.works, chosen.choices, strict=True):
            for node, choice in zip(work.nodes, choices, strict=True):
                for k, state in enumerate(choice.outputs):
                    self.made[node, k] = state
        self._read()
        self.handed: dict[int, list[tuple[Tensor, Placement]]] = {w.index: [] for w in draft.works}
        self.inputs: dict[int, list[tuple[Tensor, Input]]] = {w.index: [] for w in draft.works}
        self.moved: dict[int, list[Communication]] = {w.index: [] for w in draft.works}
        self._cross()

    def _read(self) -> None:
        draft = self.draft
        self.needed: dict[int, dict[tuple[Tensor, Placement], None]] = {}
        for work, choices in zip(draft.works, self.chosen.choices, strict=True):
            degree = draft.layouts[work.index].tensor
            needed = self.needed.setdefault(work.index, {})
            for node, choice in zip(work.nodes, choices, strict=True):
                flows = any((node, k) in draft.flow.needs for k in range(len(choice.outputs)))
                for tensor, state in zip(reads(node), choice.inputs, strict=True):
                    needed[tensor, state] = None
                    if flows:
                        self.live.add((tensor, degree, state))
        assert draft.step.graph is not None
        self.outputs = [t for n in draft.step.graph.find_nodes(op="output") for t in reads(n)]
        for tensor in self.outputs:
            degree = draft.source(tensor)[0].tensor
            if tensor in draft.makers:
                self.needed[draft.makers[tensor]][tensor, R] = None
            if draft.flow.backward:
                self.live.add((tensor, degree, R))

    def _cross(self) -> None:
        """Inputs of every component, in the order of their use; each move over a border at its
        first reader."""
        done: set[tuple[str, int, Placement]] = set()
        for work in self.draft.works:
            for tensor in work.borders:
                for state in [s for t, s in self.needed[work.index] if t == tensor]:
                    self._input(work, tensor, state, done)
        for tensor in self.outputs:
            self._hand(tensor, R)

    def _hand(self, tensor: Tensor, state: Placement) -> None:
        if tensor in self.draft.makers:
            handed = self.handed[self.draft.makers[tensor]]
            if (tensor, state) not in handed:
                handed.append((tensor, state))

    def _input(self, work: Work, tensor: Tensor, state: Placement, done: set[Any]) -> None:
        draft = self.draft
        source, target = draft.source(tensor)[0], draft.layouts[work.index]
        value, made = value_of(tensor), self.made.get(tensor, R)
        maker = draft.makers.get(tensor)
        found: tuple[Collective, ...] | None
        if source.tensor == target.tensor:
            inside = maker is not None and (tensor, state) in self.needed[maker]
            have, want = state if inside else made, state
            found = move_collectives(
                value, have, want, target.tensor, self.gradient(tensor, target.tensor, want)
            )
        else:
            want = self.chosen.wanted[tensor, target.tensor]
            route = draft.route(tensor, made, want, source, target)
            assert route is not None, f"{tensor} does not cross as {want}"
            have = route[0]
            if maker is not None and have != made:
                self.needed[maker][tensor, have] = None
            if tensor in draft.flow.needs:
                self.live |= {(tensor, source.tensor, have), (tensor, target.tensor, want)}
            found = edge_collectives(value, have, want, source, target, tensor in draft.flow.needs)
        if want != have or source.tensor != target.tensor:
            key = (value.name, target.tensor, want)
            if key not in done:
                done.add(key)
                self.moved[work.index].append(Communication(tuple(found or ())))
        item = Input(value, maker, have, want)
        if (tensor, item) not in self.inputs[work.index]:
            self.inputs[work.index].append((tensor, item))
        self._hand(tensor, have)

    def gradient(self, tensor: Tensor, degree: int, state: Placement) -> bool:
        return tensor in self.draft.flow.needs and (tensor, degree, state) in self.live


class Writer:
    """Writes one component's local graph."""

    def __init__(self, traffic: Traffic, work: Work) -> None:
        self.traffic, self.work = traffic, work
        self.draft = traffic.draft
        self.layout = self.draft.layouts[work.index]
        self.m = self.layout.tensor
        self.graph = torch.fx.Graph()
        self.events: list[Event] = list(traffic.moved[work.index])
        self.computed = 0.0  # operations since the last event
        self.forms: dict[tuple[Tensor, Placement], Node] = {}
        self.base: dict[Tensor, Placement] = {}
        self.numbers: dict[Node, Node] = {}

    def placeholders(self) -> None:
        self.axis = self.graph.placeholder("axis")
        self.rows = self.graph.placeholder("rows")
        self.rows.meta["of_rows"] = True
        for tensor, item in self.traffic.inputs[self.work.index]:
            name = f"{tensor[0].name}_{tensor[1]}" if tensor[1] else tensor[0].name
            again = (
                f"_{len(self.forms)}" if tensor in self.base else ""
            )  # the same value in another state
            node = self.graph.placeholder(name + again)
            node.meta["of_rows"] = tensor[0] in self.traffic.of_rows
            self.forms[tensor, item.want] = node
            self.base.setdefault(tensor, item.want)
        for held in (*self.work.parameters, *self.work.buffers, *self.work.constants):
            state = self.traffic.chosen.held[held, self.m]
            self.forms[(held, 0), state] = node = self.graph.placeholder(held.name)
            node.meta["buffer"] = held.meta["role"] == "buffer"
            self.base[held, 0] = state

    def form(self, tensor: Tensor, state: Placement) -> Node:
        """The node of a tensor in a state, moved there if need be."""
        if (tensor, state) not in self.forms:
            source = self.base[tensor]
            if source == state:
                maker, k = tensor
                assert isinstance(maker.meta["value"], tuple)
                whole = self.forms[(maker, -1), R]
                self.forms[tensor, state] = self.graph.call_function(getitem, (whole, k))
            else:
                x = self.form(tensor, source)
                made = self.graph.call_method("move", (self.axis, x, str(source), str(state)))
                self.forms[tensor, state] = made
                gradient = self.traffic.gradient(tensor, self.m, state)
                self.hop(move_collectives(value_of(tensor), source, state, self.m, gradient))
        return self.forms[tensor, state]

    def hop(self, collectives: tuple[Collective, ...], pauses: bool = True) -> None:
        """Notes a move, after what was computed before it."""
        self.span()
        self.events.append(Communication(collectives, pauses))

    def span(self) -> None:
        if self.computed:
            self.events.append(Computation(self.computed))
            self.computed = 0.0

    def number(self, node: Node) -> Node:
        """An integer of the step, computed from this component's rows."""
        if node.op == "placeholder":
            assert node.meta["role"] == "rows", f"{node} is no number"
            return self.rows
        if node not in self.numbers:
            args = map_arg(node.args, self._any)
            self.numbers[node] = self.graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        return self.numbers[node]

    def _any(self, node: Node) -> Node:
        return self.form(origin(node), R) if values_of(node) else self.number(node)

    def write(self) -> None:
        choices = self.traffic.chosen.choices[self.work.index]
        for i, (node, choice) in enumerate(zip(self.work.nodes, choices, strict=True)):
            states = iter(choice.inputs)

            def mapped(n: Node, states: Any = states) -> Node:
                return self.form(origin(n), next(states)) if values_of(n) else self.number(n)

            given = {name: map_arg(x, mapped) for name, x in arguments(node).items()}
            given |= {n: map_arg(x, self.number) for n, x in choice.constants.items()}
            if draws(node):
                rows = any(v is not None and v.rows is not None for v in values_of(node))
                self.graph.call_method("stream", (self.axis, i, choice.draws_apart, rows))
            emit = Emit(self.graph, self.axis)
            made = choice.replace(emit, given) if choice.replace else emit.original(node, given)
            operator = self.draft.menus[self.work.index].operators[i]
            self.computed += operator.work * choice.share
            if choice.collectives:
                self.hop(choice.collectives, pauses=False)
            if isinstance(node.meta["value"], tuple):
                self.forms[(node, -1), R] = made
            else:
                self.forms[(node, 0), choice.outputs[0]] = made
            for k, state in enumerate(choice.outputs):
                self.base[node, k] = state
        handed = self.traffic.handed[self.work.index]
        self.graph.output(tuple(self.form(t, s) for t, s in handed))
        self.span()

    def result(self) -> LocalComponent:
        self.placeholders()
        self.write()
        self.graph.lint()
        draft, work = self.draft, self.work
        component = draft.step.chain.components[work.index]
        whole = {}
        if self.m > 1:
            for node in work.parameters:
                if not self.traffic.chosen.held[node, self.m].sharded:
                    whole[node.meta["name"]] = why_whole(
                        work, draft.menus[work.index], node, self.m
                    )
        return LocalComponent(
            component=component,
            layout=self.layout,
            graph=torch.fx.GraphModule({}, self.graph),
            inputs=tuple(item for _, item in self.traffic.inputs[work.index]),
            outputs=tuple(Output(value_of(t), s) for t, s in self.traffic.handed[work.index]),
            parameters=tuple(n.meta["name"] for n in work.parameters),
            buffers=tuple(n.meta["name"] for n in work.buffers),
            constants=tuple(value_of((n, 0)) for n in work.constants),
            events=tuple(self.events),
            unsharded=whole,
            arrivals=len(self.traffic.moved[work.index]),
        )


def localise(draft: Draft, chosen: Assignment) -> Partition:
    """The partition that an assignment describes."""
    traffic = Traffic(draft, chosen)
    components = tuple(Writer(traffic, work).result() for work in draft.works)
    placements = {}
    for work, layout in zip(draft.works, draft.layouts, strict=True):
        for node in (*work.parameters, *work.buffers):
            placements[node.meta["name"], layout] = chosen.held[node, layout.tensor]
    outputs = tuple(Output(value_of(t), R) for t in traffic.outputs)
    return Partition(components, placements, outputs)
