"""The placement problem of a step: units, flows, and the assignment that a solution means."""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.rules.operator import OpSpec, P, R, inside_rows, r
from synchromesh.values.layout import Layout
from synchromesh.values.placement import Placement

from .analysis import Analysis
from .moves import TABLE, edge_collectives, move_collectives
from .placement_problem import MovePrice, PlacementProblem, Port, Price, UnitOption, ValueFlow
from .subgraph import Subgraph, Tensor, value_of

PortsOf = dict[int, list[Port]]  # by component
# of parameters: no traffic, and no rank holds a parameter twice
FREE_MOVES = {("R", "P"), ("r", "P"), ("r", "R")}


@dataclass
class Assignment:
    """What was chosen: a spec per operator, states of placeholders and of values that cross."""

    specs: tuple[tuple[OpSpec, ...], ...]  # by component and operator
    placeholders: dict[tuple[Node, Layout], Placement]  # by (node, layout)
    crossing: dict[tuple[Tensor, Layout], Placement]  # values read under another layout


@dataclass
class StepProblem:
    """A step with a layout for each component, as a placement problem. layouts: degrees and
    positions alone (`Layout.mesh`). leaf_layouts: that of the batch on the devices of each stage.
    pins: placements fixed beforehand, by a parameter's name and layout."""

    analysis: Analysis
    layouts: tuple[Layout, ...]
    leaf_layouts: Mapping[range, Layout]
    rows: int
    pins: Mapping[tuple[str, Layout], Placement]
    price: Price
    problem: PlacementProblem = field(default_factory=PlacementProblem)

    # bytes sent: the price of moving a pinned parameter, where nothing else is valid
    PENALTY: ClassVar[float] = 1e9

    def __post_init__(self) -> None:
        self.step, self.flow = self.analysis.step, self.analysis.flow
        self.subgraphs = self.analysis.subgraphs
        self._units: dict[Hashable, int] = {}
        # parameter unit -> its parts of its component's and of all parameter bytes
        self._shares: dict[int, tuple[float, float]] = {}
        degrees = ((s.index, self.layout(s).tensor) for s in self.subgraphs)
        self.strategies = [self.analysis.strategies(*each) for each in degrees]
        numbers: dict[Hashable, int] = {}
        self.classes: list[int] = []
        for s, kind in zip(self.subgraphs, self.analysis.kinds, strict=True):
            layout = self.layout(s)
            pins = tuple(self.pin(n, layout) for n in (*s.parameters, *s.buffers))
            name = kind, layout.data, layout.tensor, pins
            self.classes.append(numbers.setdefault(name, len(numbers)))
        self._add_placeholders()
        self._add_operators()
        self._add_flows()

    def layout(self, subgraph: Subgraph) -> Layout:
        return self.layouts[subgraph.index]

    def pin(self, node: Node, layout: Layout) -> Placement | None:
        return R if layout.tensor == 1 else self.pins.get((meta.name(node), layout))

    def _add_placeholders(self) -> None:
        """A unit for a parameter under a layout, one for equal components' in one place."""
        uses = list(self._uses())
        roots = _united((("node", n, layout), ("use", c, slot)) for _, n, layout, c, slot in uses)
        read = {(c, slot): (s, n) for s, n, _, c, slot in uses}  # of each class, one component
        states: dict[Hashable, set[Placement]] = {}
        for (c, slot), (subgraph, node) in read.items():
            of_use = self.strategies[subgraph.index].states_read(subgraph, node)
            states.setdefault(roots["use", c, slot], set()).update(of_use)
        names: dict[int, set[str]] = {}
        for subgraph, node, layout, *_ in uses:
            root = roots["node", node, layout]
            if root not in self._units:
                self._units[root] = self.problem.unit(self._options(node, layout, states[root]))
                if meta.role(node) == "parameter":
                    self._shares[self._units[root]] = self._share(node, subgraph)
            unit = self._units["placeholder", node, layout] = self._units[root]
            if meta.name(node) not in names.setdefault(unit, set()):
                names[unit].add(meta.name(node))
                self.problem.counts[unit] += 1

    def _uses(self) -> Iterator[tuple[Subgraph, Node, Layout, int, int]]:
        """Every placeholder of every component: component, node, layout, class, place."""
        for s, name in zip(self.subgraphs, self.classes, strict=True):
            for slot, node in enumerate((*s.parameters, *s.buffers, *s.constants)):
                yield s, node, self.layout(s), name, slot

    def _share(self, node: Node, subgraph: Subgraph) -> tuple[float, float]:
        components = self.step.chain.components
        own = float(value_of((node, 0)).bytes(1))
        of_component = float(components[subgraph.index].parameter_bytes)
        of_all = float(sum(c.parameter_bytes for c in components))
        return own / max(of_component, 1.0), own / max(of_all, 1.0)

    def _options(self, node: Node, layout: Layout, states: set[Placement]) -> list[UnitOption]:
        value, pinned = value_of((node, 0)), self.pin(node, layout)
        placements = {R}
        if meta.role(node) == "parameter" or node in self.flow.mutated:
            placements |= {s for s in states if s.sharded}
            if value.differentiable and layout.tensor > 1:
                placements.add(r)
        chosen = sorted(placements) if pinned is None else [pinned]
        return [self._option(node, s, layout.tensor) for s in chosen]

    def _option(self, node: Node, state: Placement, m: int) -> UnitOption:
        value, is_parameter = value_of((node, 0)), meta.role(node) == "parameter"
        parts, size = m if state.sharded else 1, value.bytes(1)
        # of ranks on average: a part in whole heads is as good as one in single entries
        held_bytes = size / parts if is_parameter else 0.0
        largest = state.padded_bytes(size, value.shape, m) / parts
        price = self.price.held_byte * largest if is_parameter else 0.0
        if state.kind == "r" and (node, 0) in self.flow.needs:  # its gradient's all-reduce
            price += self.price.byte * 2 * (m - 1) / m * size
        return UnitOption((), (state,), price, held_bytes)

    def must_shard(self, unit: int) -> bool:
        """Whether the unit is a parameter that must be sharded if it can be."""
        of_component, of_all = self._shares.get(unit, (0.0, 0.0))
        return of_component > self.price.small[0] and of_all > self.price.small[1]

    def _add_operators(self) -> None:
        for subgraph, name in zip(self.subgraphs, self.classes, strict=True):
            rows = self.rows / self.layout(subgraph).data
            strategies = self.strategies[subgraph.index]
            pairs = zip(strategies.operators, strategies.specs, strict=True)
            for i, (op, specs) in enumerate(pairs):
                key = ("operator", name, i)
                if key not in self._units:
                    work = self.price.flop * op.work * rows
                    self._units[key] = self.problem.unit([
                        UnitOption(
                            s.inputs, s.outputs,
                            work * s.share + self.price.collectives(s.collectives, rows)
                        )
                        for s in specs
                    ])  # fmt: skip
                self.problem.counts[self._units[key]] += 1

    def unit(self, subgraph: Subgraph, i: int) -> int:
        return self._units["operator", self.classes[subgraph.index], i]

    def _fixed_unit(self, key: Hashable, option: UnitOption) -> int:
        """A unit with one option, made once; it does not count."""
        if key not in self._units:
            self._units[key] = self.problem.unit([option])
        return self._units[key]

    def _add_flows(self) -> None:
        readers, outputs = self.analysis.readers, self.analysis.outputs
        for tensor in [*readers, *(t for t in outputs if t not in readers)]:
            by_component = {
                c: [(self.unit(self.subgraphs[c], i), slot) for i, slot in read]
                for c, read in readers.get(tensor, {}).items()
            }
            match meta.role(tensor[0]):
                case "leaf":
                    self._add_leaf(tensor, by_component)
                case "parameter" | "buffer" | "constant":
                    self._add_placeholder_flows(tensor[0], by_component)
                case _:
                    self._add_value(tensor, by_component, tensor in outputs)

    def _add_leaf(self, tensor: Tensor, by_component: PortsOf) -> None:
        """A leaf of the batch is there on the devices of each stage that reads it."""
        for stage in dict.fromkeys(self.layouts[c].positions for c in by_component):
            here = {c: x for c, x in by_component.items() if self.layouts[c].positions == stage}
            self._add_value(tensor, here, False)

    def _add_placeholder_flows(self, node: Node, by_component: PortsOf) -> None:
        for c, readers in by_component.items():
            layout = self.layouts[c]
            if layout.tensor > 1:
                unit = self._units["placeholder", node, layout]
                move = self._placeholder_move(node, layout)
                made = partial(ValueFlow, price=move, rigid=True)
                self.problem.flow("placeholder", (unit, 0), readers, made)

    def _value_flow(
        self, tensor: Tensor, layout: Layout, maker: Port, readers: tuple[Port, ...]
    ) -> ValueFlow:
        options = self.problem.options
        states = {o.makes[maker[1]] for o in options[maker[0]]}
        states |= {o.reads[slot] for unit, slot in readers for o in options[unit]}
        price = self._move_price(tensor, layout)
        return ValueFlow(maker, readers, price, any(map(inside_rows, states)))

    def _add_value(self, tensor: Tensor, by_component: PortsOf, is_output: bool) -> None:
        """From its maker to its readers, through border units where layouts differ."""
        source = self.source(tensor, *(self.layouts[c] for c in by_component))
        maker = self._maker(tensor)
        same: list[Port] = []
        other: dict[Layout, PortsOf] = {}  # layout -> component -> readers
        for c, readers in by_component.items():
            if self.layouts[c] == source:
                same += readers
            else:
                other.setdefault(self.layouts[c], {})[c] = readers
        if is_output and source.tensor > 1:
            same.append((self._fixed_unit(("output", maker), UnitOption((R,), ())), 0))
        if same and source.tensor > 1:
            self.problem.flow("value", maker, same, partial(self._value_flow, tensor, source))
        for target, reading in other.items():
            self._add_border(tensor, maker, source, target, reading)

    def _add_border(
        self, tensor: Tensor, maker: Port, source: Layout, target: Layout, reading: PortsOf
    ) -> None:
        states = {R} | {
            option.reads[slot]
            for unit, slot in chain.from_iterable(reading.values())
            for option in self.problem.options[unit]
        }
        wanted = [w for w in sorted(states) if self.route(tensor, R, w, source, target)]
        border = self.problem.unit([UnitOption((w,), (w,)) for w in wanted])
        self.problem.counts[border] = 1
        self._units["border", tensor, target] = border

        def cross(a: Placement, b: Placement) -> float | None:
            route = self.route(tensor, a, b, source, target)
            return None if route is None else route[1]

        crossing = partial(ValueFlow, price=cross, rigid=True, crosses=True)
        self.problem.flow("border", maker, [(border, 0)], crossing)
        inside = partial(ValueFlow, price=self._move_price(tensor, target))
        for c, readers in reading.items():
            self.problem.flow(("border", c), (border, 0), readers, inside)

    def source(self, tensor: Tensor, *readers: Layout) -> Layout:
        """The layout in which a value is made; of a leaf that of the stage of its `readers`."""
        if meta.role(tensor[0]) == "leaf":
            return self.leaf_layouts[readers[0].positions]
        return self.layouts[self.analysis.makers[tensor][0]]

    def _maker(self, tensor: Tensor) -> Port:
        if meta.role(tensor[0]) == "leaf":
            return self._fixed_unit(("leaf", tensor[0]), UnitOption((), (R,))), 0
        component, operator = self.analysis.makers[tensor]
        return self.unit(self.subgraphs[component], operator), tensor[1]

    def _placeholder_move(self, node: Node, layout: Layout) -> MovePrice:
        is_parameter, value = meta.role(node) == "parameter", value_of((node, 0))
        if node in self.flow.mutated:
            return lambda a, b: None
        move = self._move_price((node, 0), layout)
        pinned = self.pin(node, layout) is not None

        def price(a: Placement, b: Placement) -> float | None:
            full = move(a, b)
            if (a.kind, b.kind) in FREE_MOVES if is_parameter else a.kind == "R":
                return full and self.price.local_byte * value.bytes(1)
            return self.PENALTY + full if pinned and full is not None else None

        return price

    def _move_price(self, tensor: Tensor, layout: Layout) -> MovePrice:
        value, backward = value_of(tensor), tensor in self.flow.needs
        m, rows = layout.tensor, self.rows / layout.data
        bytes_ = value.bytes(1) * (rows**value.rows.power if value.rows else 1.0)

        def price(a: Placement, b: Placement) -> float | None:
            if inside_rows(a) or inside_rows(b):
                return None
            if (a.kind, b.kind) not in TABLE or not self.analysis.operand(tensor).allows(b, m):
                return None
            sent = move_collectives(value, a, b, m, backward)
            local = self.price.partial_byte if b.kind == "P" else self.price.local_byte
            return self.price.collectives(sent, rows) + local * bytes_

        return price

    def route(
        self, tensor: Tensor, made: Placement, want: Placement, source: Layout, target: Layout
    ) -> tuple[Placement, float] | None:
        """How a value crosses to `want` of another degree: the state it leaves in, its price."""
        value, backward = value_of(tensor), tensor in self.flow.needs
        move = self._move_price(tensor, source)
        best: tuple[Placement, float] | None = None
        for have in dict.fromkeys((made, R, r, P)):
            if not self.analysis.operand(tensor).allows(have, source.tensor):
                continue
            before = 0.0 if have == made else move(made, have)
            sent = edge_collectives(value, have, want, source, target, backward)
            if before is None or sent is None:
                continue
            total = before + self.price.collectives(sent, self.rows / source.data)
            if best is None or total < best[1] - 1e-9:
                best = have, total
        return best

    def assignment(self, taken: list[int]) -> Assignment:
        specs = []
        for subgraph, strategies in zip(self.subgraphs, self.strategies, strict=True):
            options = ((self.unit(subgraph, i), s) for i, s in enumerate(strategies.specs))
            specs.append(tuple(s[taken[unit]] for unit, s in options))
        states: dict[str, dict[Any, Placement]] = {"placeholder": {}, "border": {}}
        for key, unit in self._units.items():
            if isinstance(key, tuple) and key[0] in states:
                states[key[0]][key[1:]] = self.problem.options[unit][taken[unit]].makes[0]
        return Assignment(tuple(specs), states["placeholder"], states["border"])


def _united(pairs: Iterator[tuple[Hashable, Hashable]]) -> dict[Hashable, Hashable]:
    """Every key's representative, the same for keys that pairs join, directly or by others."""
    groups: dict[Hashable, list[Hashable]] = {}
    for pair in pairs:
        small, large = sorted((groups.setdefault(key, [key]) for key in pair), key=len)
        if small is not large:
            large += small
            groups |= dict.fromkeys(small, large)
    return {key: group[0] for key, group in groups.items()}
