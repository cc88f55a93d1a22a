"""The integer program of a step: its units and links, and an assignment read back from its
solution."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from synchromesh.trace.partition.analysis import (
    Flow,
    Menu,
    Tensor,
    Work,
    menu,
    operand_of,
    reads,
    value_of,
)
from synchromesh.trace.partition.assignment import MovePrice, Option, Price, Problem
from synchromesh.trace.partition.edges import edge_collectives
from synchromesh.trace.partition.moves import TABLE, move_collectives
from synchromesh.trace.rules import Choice
from synchromesh.trace.rules.operator import inside_rows
from synchromesh.trace.step import Step
from synchromesh.values.layout import Layout
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement
from synchromesh.values.placement import REPLICATED_PARTIAL_GRADIENT as r

R, P = REPLICATED, PARTIAL
PENALTY = 1e9  # moves of pinned parameters: only where nothing else is valid
FREE_MOVES = {
    ("R", "P"),
    ("r", "P"),
    ("r", "R"),
}  # of parameters: no traffic, and nothing is held twice


@dataclass
class Assignment:
    """What was chosen: a choice per operator, the states of placeholders, of values over
    borders of degrees."""

    choices: tuple[tuple[Choice, ...], ...]  # by component and operator
    held: dict[tuple[Node, int], Placement]  # placeholders by (node, tensor degree)
    wanted: dict[tuple[Tensor, int], Placement]  # values read under another degree


@dataclass
class Draft:
    """A step with layouts, as an integer program."""

    step: Step
    flow: Flow
    works: tuple[Work, ...]
    layouts: tuple[Layout, ...]
    rows: int
    pins: Mapping[tuple[str, Layout], Placement]
    price: Price
    problem: Problem = field(default_factory=Problem)

    def __post_init__(self) -> None:
        self.leaf_layout = max(self.layouts, key=lambda x: x.data)
        self._menus: dict[Hashable, Menu] = {}
        self._units: dict[Hashable, int] = {}
        self._parents: dict[Hashable, Hashable] = {}
        self._weights: dict[
            int, tuple[float, float]
        ] = {}  # parameter unit -> its bytes, its component's
        self._names: dict[int, set[str]] = {}
        self.menus = [self._menu(w, x) for w, x in zip(self.works, self.layouts, strict=True)]
        self.classes = [self._class(w, x) for w, x in zip(self.works, self.layouts, strict=True)]
        self.makers = {
            (n, k): w.index for w in self.works for n in w.nodes for k in range(_count(n))
        }
        self._placeholders()
        self._operators()
        self._links()

    # -- units
    # -------------------------------------------------------------------------------------

    def _menu(self, work: Work, layout: Layout) -> Menu:
        key = (work.signature, layout.tensor)
        if key not in self._menus:
            self._menus[key] = menu(work, layout.tensor)
        return self._menus[key]

    def pin(self, node: Node, layout: Layout) -> Placement | None:
        if layout.tensor == 1:
            return R
        return self.pins.get((node.meta["name"], layout))

    def _class(self, work: Work, layout: Layout) -> Hashable:
        held = (*work.parameters, *work.buffers)
        return (work.signature, layout.tensor, tuple(self.pin(n, layout) for n in held))

    def _root(self, key: Hashable) -> Hashable:
        while self._parents.get(key, key) != key:
            key = self._parents[key]
        return key

    def _placeholders(self) -> None:
        """One unit for a parameter under one degree, and for the parameters that equal
        components use alike."""
        uses: list[tuple[Hashable, Work, int, Node]] = []
        for work, layout, name in zip(self.works, self.layouts, self.classes, strict=True):
            for slot, node in enumerate((*work.parameters, *work.buffers, *work.constants)):
                use: Hashable = ("use", name, slot)
                own: Hashable = ("name", node, layout.tensor)
                self._parents[self._root(own)] = self._root(use)
                uses.append((own, work, layout.tensor, node))
        states: dict[Hashable, set[Placement]] = {}
        for own, work, _, node in uses:
            found = states.setdefault(self._root(own), set())
            menu_ = self.menus[work.index]
            for at, ways in zip(work.nodes, menu_.choices, strict=True):
                for slot, tensor in enumerate(reads(at)):
                    if tensor == (node, 0):
                        found |= {c.inputs[slot] for c in ways}
        total = float(sum(c.parameter_bytes for c in self.step.chain.components))
        for own, work, degree, node in uses:
            root = self._root(own)
            if root not in self._units:
                options = self._held_options(node, self.layouts[work.index], states[root])
                self._units[root] = self.problem.unit(options)
                if node.meta["role"] == "parameter":
                    bytes_ = float(value_of((node, 0)).bytes(1))
                    part = float(self.step.chain.components[work.index].parameter_bytes)
                    self._weights[self._units[root]] = (
                        bytes_ / max(part, 1.0),
                        bytes_ / max(total, 1.0),
                    )
            unit = self._units[root]
            self._units["held", node, degree] = unit
            names = self._names.setdefault(unit, set())
            if node.meta["name"] not in names:
                names.add(node.meta["name"])
                self.problem.counts[unit] += 1

    def _held_options(self, node: Node, layout: Layout, states: set[Placement]) -> list[Option]:
        value, m = value_of((node, 0)), layout.tensor
        pinned, role = self.pin(node, layout), node.meta["role"]
        found = {R}
        if role == "parameter" or node in self.flow.mutated:
            found |= {s for s in states if s.sharded}
            if value.differentiable and m > 1:
                found.add(r)
        if pinned is not None:
            found = {pinned}
        options = []
        for s in sorted(found):
            held = value.bytes(1) / (m if s.sharded else 1) if role == "parameter" else 0.0
            price = self.price.held_byte * held
            if s.kind == "r" and (node, 0) in self.flow.needs:
                price += (
                    self.price.byte * 2 * (m - 1) / m * value.bytes(1)
                )  # its gradient's all-reduce
            options.append(Option((), (s,), price, held))
        return options

    def weighty(self, unit: int) -> bool:
        """Whether the unit is a parameter that must be sharded if it can be."""
        part, whole = self._weights.get(unit, (0.0, 0.0))
        return part > self.price.small[0] and whole > self.price.small[1]

    def _operators(self) -> None:
        for work, layout, name in zip(self.works, self.layouts, self.classes, strict=True):
            rows = self.rows / layout.data
            found = self.menus[work.index]
            for i, (op, ways) in enumerate(zip(found.operators, found.choices, strict=True)):
                key = ("operator", name, i)
                if key not in self._units:
                    work_price = self.price.flop * op.work * rows
                    self._units[key] = self.problem.unit(
                        [
                            Option(
                                c.inputs, c.outputs,
                                work_price * c.share + self.price.collectives(c.collectives, rows),
                            )
                            for c in ways
                        ]
                    )  # fmt: skip
                self.problem.counts[self._units[key]] += 1

    def unit(self, work: Work, i: int) -> int:
        return self._units["operator", self.classes[work.index], i]

    # -- links
    # -------------------------------------------------------------------------------------

    def readers(self) -> dict[Tensor, dict[int, list[tuple[int, int]]]]:
        """Who reads each tensor: component -> (unit, slot)."""
        found: dict[Tensor, dict[int, list[tuple[int, int]]]] = {}
        for work in self.works:
            for i, node in enumerate(work.nodes):
                for slot, tensor in enumerate(reads(node)):
                    found.setdefault(tensor, {}).setdefault(work.index, []).append(
                        (self.unit(work, i), slot)
                    )
        return found

    def _links(self) -> None:
        found = self.readers()
        assert self.step.graph is not None
        outputs = [t for n in self.step.graph.find_nodes(op="output") for t in reads(n)]
        for tensor in [*found, *(t for t in outputs if t not in found)]:
            role = tensor[0].meta.get("role")
            per_component = found.get(tensor, {})
            if role in ("parameter", "buffer", "constant"):
                for c, places in per_component.items():
                    if self.layouts[c].tensor == 1:
                        continue
                    unit = self._units["held", tensor[0], self.layouts[c].tensor]
                    price = self._held_move(tensor[0], self.layouts[c])
                    self.problem.link("held", (unit, 0), places, price, True)
                continue
            self._value_links(tensor, per_component, tensor in outputs)

    def _value_links(
        self, tensor: Tensor, per_component: dict[int, list[tuple[int, int]]], out: bool
    ) -> None:
        """Links of a value from its maker to its readers, through border units where degrees
        differ."""
        source, maker = self.source(tensor)
        same: list[tuple[int, int]] = []
        other: dict[int, list[int]] = {}
        for c, places in per_component.items():
            if self.layouts[c].tensor == source.tensor:
                same += places
            else:
                other.setdefault(self.layouts[c].tensor, []).append(c)
        if out and (source.tensor > 1):
            key = ("output", maker)
            if key not in self._units:
                self._units[key] = self.problem.unit([Option((R,), (), 0.0)])
            same.append((self._units[key], 0))
        if same and source.tensor > 1:
            states = {o.makes[maker[1]] for o in self.problem.options[maker[0]]}
            rigid = any(inside_rows(s) for s in states)
            self.problem.link("value", maker, same, self._move_price(tensor, source), rigid)
        for degree, components in other.items():
            target = self.layouts[components[0]]
            states = {R}
            for c in components:
                for unit, slot in per_component[c]:
                    states |= {o.reads[slot] for o in self.problem.options[unit]}
            wants = [
                w for w in sorted(states) if self.route(tensor, R, w, source, target) is not None
            ]
            border = self.problem.unit([Option((w,), (w,)) for w in wants])
            self.problem.counts[border] = 1
            self._units["border", tensor, degree] = border
            crossing = self._cross_price(tensor, source, target)
            self.problem.link("border", maker, [(border, 0)], crossing, True, crosses=True)
            for c in components:
                price = self._move_price(tensor, target)
                self.problem.link(("border", c), (border, 0), per_component[c], price, False)

    def source(self, tensor: Tensor) -> tuple[Layout, tuple[int, int]]:
        """The layout in which a value is made, and its maker."""
        if tensor[0].meta.get("role") == "leaf":
            key = ("leaf", tensor[0])
            if key not in self._units:
                self._units[key] = self.problem.unit([Option((), (R,))])
            return self.leaf_layout, (self._units[key], 0)
        work = self.works[self.makers[tensor]]
        return self.layouts[work.index], (self.unit(work, work.nodes.index(tensor[0])), tensor[1])

    # -- prices of moves
    # -----------------------------------------------------------------------------

    def _held_move(self, node: Node, layout: Layout) -> MovePrice:
        role, value = node.meta["role"], value_of((node, 0))
        if node in self.flow.mutated:
            return lambda a, b: None
        move = self._move_price((node, 0), layout)
        pinned = self.pin(node, layout) is not None

        def price(a: Placement, b: Placement) -> float | None:
            free = (a.kind, b.kind) in FREE_MOVES if role == "parameter" else a.kind == "R"
            if free:
                return move(a, b) and self.price.local_byte * value.bytes(1)
            full = move(a, b)
            return PENALTY + full if pinned and full is not None else None

        return price

    def _move_price(self, tensor: Tensor, layout: Layout) -> MovePrice:
        value, backward = value_of(tensor), tensor in self.flow.needs
        x, m, rows = operand_of(tensor), layout.tensor, self.rows / layout.data
        bytes_ = value.bytes(1) * (rows if value.rows else 1.0)

        def price(a: Placement, b: Placement) -> float | None:
            if inside_rows(a) or inside_rows(b):
                return None
            if (a.kind, b.kind) not in TABLE or not x.allows(b, m):
                return None
            found = move_collectives(value, a, b, m, backward)
            local = self.price.partial_byte if b.kind == "P" else self.price.local_byte
            return self.price.collectives(found, rows) + local * bytes_

        return price

    def _cross_price(self, tensor: Tensor, source: Layout, target: Layout) -> MovePrice:
        def price(a: Placement, b: Placement) -> float | None:
            found = self.route(tensor, a, b, source, target)
            return None if found is None else found[1]

        return price

    def route(
        self, tensor: Tensor, a: Placement, want: Placement, source: Layout, target: Layout
    ) -> tuple[Placement, float] | None:
        """How a value made in state `a` crosses to `want` of another degree: the state it
        leaves in, its price."""
        value, backward = value_of(tensor), tensor in self.flow.needs
        rows = self.rows / source.data
        move = self._move_price(tensor, source)
        best: tuple[Placement, float] | None = None
        for have in dict.fromkeys((a, R, r, P)):
            if not operand_of(tensor).allows(have, source.tensor):
                continue
            step = 0.0 if have == a else move(a, have)
            found = edge_collectives(value, have, want, source, target, backward)
            if step is None or found is None:
                continue
            total = step + self.price.collectives(found, rows)
            if best is None or total < best[1] - 1e-9:
                best = have, total
        return best

    # -- the solution
    # ----------------------------------------------------------------------------------

    def assignment(self, taken: list[int]) -> Assignment:
        """The solution in terms of the step."""
        choices = []
        for work, found in zip(self.works, self.menus, strict=True):
            options = ((self.unit(work, i), c) for i, c in enumerate(found.choices))
            choices.append(tuple(c[taken[u]] for u, c in options))
        held: dict[tuple[Node, int], Placement] = {}
        wanted: dict[tuple[Tensor, int], Placement] = {}
        for key, unit in self._units.items():
            if isinstance(key, tuple) and key[0] == "held":
                held[key[1], key[2]] = self.problem.options[unit][taken[unit]].makes[0]
            elif isinstance(key, tuple) and key[0] == "border":
                wanted[key[1], key[2]] = self.problem.options[unit][taken[unit]].makes[0]
        return Assignment(tuple(choices), held, wanted)


def _count(node: Node) -> int:
    found: Any = node.meta.get("value")
    return len(found) if isinstance(found, tuple) else 1
