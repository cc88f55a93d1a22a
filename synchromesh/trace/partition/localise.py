"""The local graphs: every operator with its chosen states, moves written in where states differ.

A move stands before its first reader and serves all readers of that state in the component:

    linear = torch.ops.aten.linear.default(input_r, weight, bias)      x in r, weight in S(0)
    ...
    add = torch.ops.aten.add.Tensor(linear_1, bias_P)                  partial
    add_R = axis.move(add, 'P', 'R')                                   the all-reduce"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from synchromesh.trace import meta
from synchromesh.trace.nodes import arguments, draws
from synchromesh.trace.rules.operator import Emit, OpSpec
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED as R
from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective

from .analysis import why_replicated
from .division import WeightUses, operations
from .local import (
    Communication,
    Computation,
    Division,
    Event,
    Input,
    LocalComponent,
    Output,
    Partition,
    PlacedOutput,
    form_of,
    program_of,
    repeated,
)
from .moves import edge_collectives, move_collectives
from .step_problem import Assignment, StepProblem
from .subgraph import Subgraph, Tensor, origin, results_of, value_of

# the states that a value is had and read in, and what brings it from one to the other
Crossing = tuple[Placement, Placement, tuple[Collective, ...]]


class Borders:
    """Which forms of values every component reads and hands out, and `moves` of inputs. live:
    states, under a layout, in which something that a gradient flows through reads a tensor."""

    def __init__(self, problem: StepProblem, assignment: Assignment) -> None:
        self.problem, self.assignment = problem, assignment
        self.analysis = problem.analysis
        self.made: dict[Tensor, Placement] = {}
        self.live: dict[tuple[Tensor, Layout], set[Placement]] = {}
        self.needed: list[dict[tuple[Tensor, Placement], None]] = [{} for _ in problem.subgraphs]
        self._collect_reads()
        self.handed: list[list[tuple[Tensor, Placement]]] = [[] for _ in problem.subgraphs]
        self.inputs: list[list[tuple[Tensor, Input]]] = [[] for _ in problem.subgraphs]
        self.moves: list[list[Communication]] = [[] for _ in problem.subgraphs]
        self._cross()

    def _collect_reads(self) -> None:
        problem = self.problem
        for subgraph, specs in zip(problem.subgraphs, self.assignment.specs, strict=True):
            layout, needed = problem.layout(subgraph), self.needed[subgraph.index]
            for node, read, spec in zip(subgraph.nodes, subgraph.reads, specs, strict=True):
                self.made |= zip(results_of(node), spec.outputs, strict=True)
                flows = any(t in problem.flow.needs for t in results_of(node))
                for tensor, state in zip(read, spec.inputs, strict=True):
                    needed[tensor, state] = None
                    if flows:
                        self._live(tensor, layout, state)
        for tensor in self.analysis.outputs:
            if tensor in self.analysis.makers:
                self.needed[self.maker(tensor)][tensor, R] = None
                if problem.flow.backward:
                    self._live(tensor, problem.source(tensor), R)

    def _live(self, tensor: Tensor, layout: Layout, state: Placement) -> None:
        self.live.setdefault((tensor, layout), set()).add(state)

    def maker(self, tensor: Tensor) -> int:
        return self.analysis.makers[tensor][0]

    def _cross(self) -> None:
        """Inputs in the order of their use; each move over a border at its first reader."""
        moved: set[tuple[str, Layout, Placement]] = set()
        for subgraph in self.problem.subgraphs:
            for tensor in subgraph.borders:
                for state in [s for t, s in self.needed[subgraph.index] if t == tensor]:
                    self._add_input(subgraph, tensor, state, moved)
        for tensor in self.analysis.outputs:
            self._hand(tensor, R)

    def _hand(self, tensor: Tensor, state: Placement) -> None:
        if tensor in self.analysis.makers:
            handed = self.handed[self.maker(tensor)]
            if (tensor, state) not in handed:
                handed.append((tensor, state))

    def _add_input(
        self, subgraph: Subgraph, tensor: Tensor, state: Placement,
        moved: set[tuple[str, Layout, Placement]],
    ) -> None:  # fmt: skip
        target = self.problem.layout(subgraph)
        source = self.problem.source(tensor, target)
        value, index = value_of(tensor), subgraph.index
        maker = self.maker(tensor) if tensor in self.analysis.makers else None
        if source == target:
            have, want, collectives = self._along_axis(tensor, maker, state, target)
        else:
            have, want, collectives = self._over_edge(tensor, maker, source, target)
        if want != have or source != target:
            key = (value.name, target, want)
            if key not in moved:
                moved.add(key)
                pauses = source.positions == target.positions
                self.moves[index].append(Communication(collectives, pauses))
        item = Input(value, maker, have, want, tensor in self.problem.flow.needs)
        if (tensor, item) not in self.inputs[index]:
            self.inputs[index].append((tensor, item))
        self._hand(tensor, have)

    def _along_axis(
        self, tensor: Tensor, maker: int | None, want: Placement, layout: Layout
    ) -> Crossing:
        """To a component of its maker's layout: moved there if the maker reads it so."""
        made_there = maker is not None and (tensor, want) in self.needed[maker]
        have = want if made_there else self.made.get(tensor, R)
        flows = self.gradient(tensor, layout, want)
        return have, want, move_collectives(value_of(tensor), have, want, layout.tensor, flows)

    def _over_edge(
        self, tensor: Tensor, maker: int | None, source: Layout, target: Layout
    ) -> Crossing:
        made, want = self.made.get(tensor, R), self.assignment.crossing[tensor, target]
        route = self.problem.route(tensor, made, want, source, target)
        assert route is not None, f"{tensor} does not cross as {want}"
        have, flows = route[0], tensor in self.problem.flow.needs
        if maker is not None and have != made:
            self.needed[maker][tensor, have] = None
        if flows:
            self._live(tensor, source, have)
            self._live(tensor, target, want)
        collectives = edge_collectives(value_of(tensor), have, want, source, target, flows)
        return have, want, collectives or ()

    def gradient(self, tensor: Tensor, layout: Layout, state: Placement) -> bool:
        live = self.live.get((tensor, layout), ())
        return tensor in self.problem.flow.needs and state in live

    def form(self, subgraph: Subgraph) -> Hashable:
        """What a local graph follows from: components of equal forms have the same, renamed."""
        names, layout = subgraph.names, self.problem.layout(subgraph)
        inputs = tuple(
            (names[tensor], item.want, tensor[0] in self.analysis.of_rows)
            for tensor, item in self.inputs[subgraph.index]
        )
        handed = tuple((names[t], state) for t, state in self.handed[subgraph.index])
        needed = self.needed[subgraph.index]
        forms = tuple((names[t], state, self.gradient(t, layout, state)) for t, state in needed)
        return self.problem.classes[subgraph.index], inputs, handed, forms


@dataclass(frozen=True)
class LocalGraph:
    """A local graph, and what of it holds for all components of its form."""

    graph: torch.fx.GraphModule
    form: str  # `form_of` of the graph
    events: tuple[Event, ...]  # without inputs that arrive
    unsharded: tuple[str, ...]  # of each parameter, why it is replicated; "": it is not
    division: Division


class LocalGraphWriter:
    """Writes one component's local graph. forms: nodes by tensor and state. made: first states."""

    def __init__(self, borders: Borders, subgraph: Subgraph) -> None:
        self.borders, self.subgraph = borders, subgraph
        self.problem, self.assignment = borders.problem, borders.assignment
        self.strategies = self.problem.strategies[subgraph.index]
        self.layout = self.problem.layout(subgraph)
        self.m = self.layout.tensor
        self.graph = Graph()
        self.events: list[Event] = []
        self.computed = 0.0  # operations since the last event
        self.work: dict[Node, float] = {}  # `division.operations` of nodes
        self.sent_by: dict[Node, int] = {}  # the event that a node runs
        self.forms: dict[tuple[Tensor, Placement], Node] = {}
        self.made: dict[Tensor, Placement] = {}
        self.numbers: dict[Node, Node] = {}

    def placeholder(self, name: str) -> Node:
        """A placeholder whose argument is called as its node is: fx makes nodes' names unique."""
        node = self.graph.placeholder(name)
        node.target = node.name
        return node

    def add_placeholders(self) -> None:
        self.axis = self.placeholder("axis")
        self.rows = self.placeholder("rows")
        meta.of_rows.set(self.rows, True)
        for tensor, item in self.borders.inputs[self.subgraph.index]:
            node = self.placeholder(tensor[0].name)
            meta.of_rows.set(node, tensor[0] in self.borders.analysis.of_rows)
            self.forms[tensor, item.want] = node
            self.made.setdefault(tensor, item.want)
        subgraph = self.subgraph
        for holder in (*subgraph.parameters, *subgraph.buffers, *subgraph.constants):
            state = self.assignment.placeholders[holder, self.layout]
            self.forms[(holder, 0), state] = node = self.placeholder(holder.name)
            meta.is_buffer.set(node, meta.role(holder) == "buffer")
            self.made[holder, 0] = state

    def form(self, tensor: Tensor, state: Placement) -> Node:
        """The node of a tensor in a state, moved there if need be."""
        if (tensor, state) not in self.forms:
            source = self.made[tensor]
            if source == state:
                maker, k = tensor
                assert isinstance(meta.value(maker), tuple)
                results = self.forms[(maker, -1), R]
                self.forms[tensor, state] = self.graph.call_function(getitem, (results, k))
            else:
                x = self.form(tensor, source)
                shape = value_of(tensor).shape
                uneven = source.sharded and not source.even(shape[source.dim], self.m)
                length = (shape[source.dim],) if uneven else ()  # which no rank knows by its part
                states = str(source), str(state)
                moved = self.graph.call_method("move", (self.axis, x, *states, *length))
                self.forms[tensor, state] = moved
                gradient = self.borders.gradient(tensor, self.layout, state)
                collectives = move_collectives(value_of(tensor), source, state, self.m, gradient)
                self.communicate(moved, collectives)
        return self.forms[tensor, state]

    def communicate(self, node: Node, sent: tuple[Collective, ...], pauses: bool = True) -> None:
        """Notes what a node sends, after what was computed before it."""
        self.finish_computation()
        self.sent_by[node] = len(self.events)
        self.events.append(Communication(sent, pauses))

    def finish_computation(self) -> None:
        if self.computed:
            self.events.append(Computation(self.computed))
            self.computed = 0.0

    def number(self, node: Node) -> Node:
        """An integer of the step, computed from this component's rows."""
        if node.op == "placeholder":
            assert meta.role(node) == "rows", f"{node} is no number"
            return self.rows
        if node not in self.numbers:
            args = map_arg(node.args, self._replicated)
            self.numbers[node] = self.graph.call_function(node.target, args, dict(node.kwargs))  # type: ignore[arg-type]
        return self.numbers[node]

    def _replicated(self, node: Node) -> Node:
        return self.form(origin(node), R) if meta.values_of(node) else self.number(node)

    def add_operator(self, i: int, spec: OpSpec) -> None:
        """The component's i-th operator, its inputs moved to the states of its spec."""
        node, states = self.subgraph.nodes[i], iter(spec.inputs)

        def mapped(n: Node) -> Node:
            is_tensor = bool(meta.values_of(n))
            return self.form(origin(n), next(states)) if is_tensor else self.number(n)

        given = {name: map_arg(x, mapped) for name, x in arguments(node).items()}
        if draws(node):
            key = (self.axis, i, spec.draws_apart, meta.has_rows(node))
            self.graph.call_method("stream", key)
        emit = Emit(self.graph, self.axis)
        made = spec.replace(emit, given) if spec.replace else emit.original(node, given)
        operator = self.strategies.operators[i]
        self.computed += operator.work * spec.share
        self.work[made] = operations(operator) * spec.share
        if spec.collectives:
            self.communicate(made, spec.collectives, pauses=False)
        if isinstance(meta.value(node), tuple):
            self.forms[(node, -1), R] = made
        else:
            self.forms[(node, 0), spec.outputs[0]] = made
        self.made |= zip(results_of(node), spec.outputs, strict=True)

    def written(self) -> LocalGraph:
        self.add_placeholders()
        for i, spec in enumerate(self.assignment.specs[self.subgraph.index]):
            self.add_operator(i, spec)
        handed = self.borders.handed[self.subgraph.index]
        self.graph.output(tuple(self.form(t, s) for t, s in handed))
        self.finish_computation()
        for node in list(self.graph.nodes)[: repeated(self.graph)]:
            if node in self.sent_by:
                event = self.events[self.sent_by[node]]
                assert isinstance(event, Communication)
                self.events[self.sent_by[node]] = replace(event, repeated=True)
        self.graph.lint()
        unsharded = (
            ""
            if self.m == 1 or self.assignment.placeholders[n, self.layout].sharded
            else why_replicated(self.subgraph, self.strategies, n, self.m)
            for n in self.subgraph.parameters
        )
        module = torch.fx.GraphModule({}, self.graph)
        return LocalGraph(
            module, form_of(self.graph), tuple(self.events), tuple(unsharded), self._division()
        )

    def _division(self) -> Division:
        inputs = [(self.forms[t, x.want], x) for t, x in self.borders.inputs[self.subgraph.index]]
        uses = WeightUses(self.graph, [node for node, _ in inputs], self._trained())
        flowing = [node for node, x in inputs if x.source is not None and x.flows]
        return uses.division(self.graph, flowing, self.work, {
            node: (value_of(tensor), state)
            for (tensor, state), node in self.forms.items()
            if tensor[1] >= 0  # a value, not a tuple of them
        })  # fmt: skip

    def _trained(self) -> list[Node]:
        component = self.problem.step.chain.components[self.subgraph.index]
        trained = {p.name for p in component.parameters if p.trainable}
        states = self.assignment.placeholders
        weights = (n for n in self.subgraph.parameters if meta.name(n) in trained)
        return [self.forms[(n, 0), states[n, self.layout]] for n in weights]


def _local(borders: Borders, subgraph: Subgraph, written: LocalGraph) -> LocalComponent:
    index, layout = subgraph.index, borders.problem.layout(subgraph)
    component = borders.problem.step.chain.components[index]
    parameters = tuple(map(meta.name, subgraph.parameters))
    buffers = tuple(map(meta.name, subgraph.buffers))
    inputs = tuple(item for _, item in borders.inputs[index])
    constants = tuple(value_of((n, 0)) for n in subgraph.constants)
    described = {t.name: t for t in (*component.parameters, *component.buffers)}
    tensors = [
        (described[meta.name(n)], borders.assignment.placeholders[n, layout])
        for n in (*subgraph.parameters, *subgraph.buffers)
    ]
    reasons = zip(parameters, written.unsharded, strict=True)
    return LocalComponent(
        component=component, layout=layout, graph=written.graph, inputs=inputs,
        outputs=tuple(Output(value_of(t), s) for t, s in borders.handed[index]),
        parameters=parameters, buffers=buffers, constants=constants,
        events=(*borders.moves[index], *written.events),
        unsharded={name: why for name, why in reasons if why},
        program=program_of(written.form, inputs, tensors, constants, layout),
        arrivals=len(borders.moves[index]), division=written.division,
    )  # fmt: skip


def localise(problem: StepProblem, assignment: Assignment) -> Partition:
    """The partition that an assignment describes, under the meshes of its layouts."""
    borders = Borders(problem, assignment)
    written: dict[Hashable, LocalGraph] = {}
    components = []
    for subgraph in problem.subgraphs:
        form = borders.form(subgraph)
        if form not in written:
            written[form] = LocalGraphWriter(borders, subgraph).written()
        components.append(_local(borders, subgraph, written[form]))
    placements = {
        (meta.name(node), problem.layout(s)): assignment.placeholders[node, problem.layout(s)]
        for s in problem.subgraphs
        for node in (*s.parameters, *s.buffers)
    }
    step, made = problem.step, problem.analysis.outputs
    first, names = len(step.outputs), (*step.reported, *step.carry)
    placed = tuple(
        PlacedOutput(of, value_of(t), borders.maker(t))
        for of, t in zip(names, made[first:], strict=True)
    )
    outputs = tuple(Output(value_of(t), R) for t in made[:first])
    of_reports, leaves = len(step.reported), problem.leaf_layouts
    return Partition(
        tuple(components), placements, outputs, leaves, placed[:of_reports], placed[of_reports:]
    )
