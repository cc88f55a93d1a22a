"""The frontier: what the decided components want of values whose source is not decided yet.

Components are decided from last to first. Cut i lies in front of node i; a value is open there
when its source stands before the cut and a target behind it:

    source 0    1    2    3        value 1 -> 2, 4 is open at cuts 2, 3 and 4
           ----(1)-->(2)
                `----------->(4)

A state of the cut is, for every open value, the set of forms that decided targets want. Nothing
else of the past matters to prices: they are paid when the source is decided and its border known.
A chain has as many states as a value has forms; a residual over two components, pairs of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from synchromesh.planner.chain.problem import Floats, Ints, PricedEdge, Prices
from synchromesh.planner.chain.table import Table


class FormSets:
    """Sets of forms, numbered as they are met, and what each costs a source."""

    EMPTY: ClassVar[int] = 0  # the number of the empty set

    def __init__(self) -> None:
        self.sets: list[tuple[int, ...]] = [()]
        self._number: dict[tuple[int, ...], int] = {(): self.EMPTY}
        self._with: dict[tuple[int, int], int] = {}
        self._cost: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def add(self, number: int, form: int) -> int:
        key = (number, form)
        if key not in self._with:
            forms = tuple(sorted({*self.sets[number], form}))
            if forms not in self._number:
                self._number[forms] = len(self.sets)
                self.sets.append(forms)
            self._with[key] = self._number[forms]
        return self._with[key]

    def cost(self, prices: Prices, number: int) -> tuple[Floats, Floats]:
        """(forward, backward) of all forms of a set, by the source's border."""
        key = (id(prices), number)
        if key not in self._cost:
            forms = list(self.sets[number])
            self._cost[key] = prices.forward[:, forms].sum(1), prices.backward[:, forms].sum(1)
        return self._cost[key]


@dataclass(frozen=True, eq=False)
class Transition:
    """From the states of cut i + 1, over the borders of node i, to the states of cut i."""

    rows: Ints  # the states of cut i: [state, open value] -> set of forms
    next: Ints  # [state of cut i + 1, border of the node] -> state of cut i
    forward: Floats  # seconds paid, by the same indices
    backward: Floats


class Frontier:
    """The cuts of a problem, some values left out (see `bounds`)."""

    def __init__(self, table: Table, left_out: frozenset[int] = frozenset()) -> None:
        self.table, self.left_out = table, left_out
        self.sets = FormSets()
        self.open: list[tuple[int, ...]] = [
            tuple(
                v
                for v, value in enumerate(table.values)
                if v not in left_out and value.source < cut <= max(value.targets)
            )
            for cut in range(len(table.nodes) + 1)
        ]
        self._known: dict[tuple[object, ...], Transition] = {}

    def cross(self, i: int, rows: Ints) -> Transition:
        """Decide node i. Equal stretches of a model (its repeated blocks) are crossed once."""
        behind, before = self.open[i + 1], self.open[i]
        values = self.table.values
        parts = tuple(
            (
                *(values_.index(v) if v in values_ else None for values_ in (behind, before)),
                *(values[v].source == i, i in values[v].targets, id(values[v].prices)),
            )
            for v in sorted({*behind, *before})
        )
        dropped = tuple(id(v.prices) for v in self._closing(i))
        key = (self.table.nodes[i].border, parts, dropped, rows.shape, rows.tobytes())
        if key not in self._known:
            self._known[key] = self._cross(i, rows)
        return self._known[key]

    def _closing(self, i: int) -> list[PricedEdge]:
        """Values left out whose last target is node i."""
        return [self.table.values[v] for v in sorted(self.left_out)
                if max(self.table.values[v].targets) == i]  # fmt: skip

    def _cross(self, i: int, rows: Ints) -> Transition:
        border = self.table.nodes[i].border
        behind, before = self.open[i + 1], self.open[i]
        shape = (len(rows), len(border))
        forward, backward = np.zeros(shape), np.zeros(shape)
        for column, v in enumerate(behind):
            value = self.table.values[v]
            if value.source == i:
                numbers, inverse = np.unique(rows[:, column], return_inverse=True)
                costs = [self.sets.cost(value.prices, int(number)) for number in numbers]
                forward += np.stack([there[[*border]] for there, _ in costs])[inverse]
                backward += np.stack([back[[*border]] for _, back in costs])[inverse]
        for value in self._closing(i):  # at least this, whatever the source's border will be
            forms = [value.prices.form[b] for b in border]
            forward += value.prices.forward.min(0)[forms]
            backward += value.prices.backward.min(0)[forms]
        known = (rows[:, behind.index(v)] if v in behind else None for v in before)
        columns = [self._wanted(i, v, sets, shape) for v, sets in zip(before, known, strict=True)]
        rows, following = distinct(columns, shape)
        return Transition(rows, following, forward, backward)

    def _wanted(self, i: int, v: int, wanted: Ints | None, shape: tuple[int, int]) -> Ints:
        """[state of cut i + 1, border of node i] -> the value's set of forms at cut i."""
        value = self.table.values[v]
        if wanted is None:
            wanted = np.full(shape[0], FormSets.EMPTY)
        if i not in value.targets:
            return np.broadcast_to(wanted[:, None], shape)
        numbers, inverse = np.unique(wanted, return_inverse=True)
        forms = [value.prices.form[b] for b in self.table.nodes[i].border]
        larger = [[self.sets.add(int(number), form) for form in forms] for number in numbers]
        return np.array(larger, dtype=np.int64)[inverse]


def distinct(columns: Sequence[Ints], shape: tuple[int, int]) -> tuple[Ints, Ints]:
    """The different rows that columns of this shape make, and the index of each entry's row."""
    if not columns:
        return np.zeros((1, 0), dtype=np.int64), np.zeros(shape, dtype=np.int64)
    code = np.zeros(shape[0] * shape[1], dtype=np.int64)
    for column in columns:
        flat = column.reshape(-1)
        code = code * (int(flat.max()) + 1) + flat
        _, first, code = np.unique(code, return_index=True, return_inverse=True)
    rows = np.stack([column.reshape(-1)[first] for column in columns], axis=1)
    return rows, code.reshape(shape)


@dataclass(frozen=True, eq=False)
class Graph:
    """All states of all cuts, from the last to the first, with what leads from one to the next."""

    frontier: Frontier
    crossings: tuple[Transition, ...]  # of node i: from cut i + 1 to cut i

    @property
    def complete(self) -> bool:
        return not self.frontier.left_out


def graph(table: Table, most: int = 300_000) -> Graph:
    """The states of every cut, at most `most` pairs of state and border at each: where there are
    more, the value that is open longest is left out (a U-Net's outermost skip)."""
    left_out: frozenset[int] = frozenset()
    while True:
        frontier = Frontier(table, left_out)
        rows = np.zeros((1, 0), dtype=np.int64)
        crossings: list[Transition] = []
        for i in reversed(range(len(table.nodes))):
            if frontier.open[i + 1] and len(rows) * len(table.nodes[i].border) > most:
                break
            crossings.append(frontier.cross(i, rows))
            rows = crossings[-1].rows
        else:
            return Graph(frontier, tuple(reversed(crossings)))
        spans = {v: max(x.targets) - x.source for v, x in enumerate(table.values)}
        left_out |= {max(frontier.open[i + 1], key=spans.__getitem__)}
