"""The placement problem: one integer program for a whole step, solved exactly by HiGHS.

Units (operators, parameters, border values) each take one of their options; an option names the
state of every tensor the unit reads and makes. Between the unit that makes a value and each
unit that reads it flows

    g[a, b] >= 0       the value is made in state a and read in state b
    sum over b of g[a, b] = options of the maker that make a
    sum over a of g[a, b] = options of the reader that read b

With these flows the linear relaxation is nearly integral (products `y >= x_a + x_b - 1` instead
take minutes). A move from a to b is paid once for all readers: M[a, b] >= g[a, b] of each.

Two steps, because replicating everything needs no traffic at all: first the fewest parameter
bytes a rank must hold; then the least price, parameters (but `Price.small`) sharded as finely."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import ClassVar

import numpy as np

from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective, sent_bytes


@dataclass(frozen=True)
class Price:
    """What things cost, in bytes sent; a measured profile may give other numbers. The other prices
    break ties between assignments of equal traffic. All are chosen, not measured."""

    byte: float = 1.0  # a byte sent
    latency: float = 1024.0  # a collective: 50 us at 20 MB/s, little beside any activation
    flop: float = 1e-5  # an operation, so that free sharding of compute is taken
    held_byte: float = 1e-3  # a parameter byte on a rank: what is sharded for nothing is sharded
    local_byte: float = 1e-5  # a byte of a value that is sliced, padded or divided without traffic
    partial_byte: float = 1e-4  # ... of an activation made partial: the division costs a pass
    # a parameter below these parts of its component's or of all parameter bytes need not be
    # sharded if that costs traffic: norms and biases
    small: tuple[float, float] = (0.04, 1e-4)

    def collectives(self, run: Sequence[Collective], rows: float) -> float:
        """The price of collectives for a data block of so many rows."""
        sent = sum(
            sent_bytes(c.kind, round(c.bytes_per_row * rows**c.power + c.fixed_bytes), c.ranks)
            for c in run
        )
        return self.byte * sent + self.latency * len(run)


@dataclass(frozen=True)
class UnitOption:
    """One way to run a unit: states it reads (by slot), makes, price, parameter bytes held."""

    reads: tuple[Placement, ...]
    makes: tuple[Placement, ...]
    price: float = 0.0
    held_bytes: float = 0.0


Port = tuple[int, int]  # a unit, and which of its outputs or which slot that it reads
MovePrice = Callable[[Placement, Placement], float | None]  # None: not allowed


@dataclass
class ValueFlow:
    """A value from its maker to its readers: what a move costs, how often an equal flow occurs."""

    maker: Port  # unit, output
    readers: tuple[Port, ...]  # unit, slot
    price: MovePrice
    rigid: bool = False  # some moves are forbidden: matters in the first step too
    crosses: bool = False  # to another degree, which costs traffic in an equal state too
    count: int = 0

    def move_price(self, made: Placement, read: Placement) -> float | None:
        return 0.0 if made == read and not self.crosses else self.price(made, read)


@dataclass
class PlacementProblem:
    """All units and flows of a step. options: of each unit. counts: how often it occurs."""

    options: list[Sequence[UnitOption]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    flows: dict[object, ValueFlow] = field(default_factory=dict)

    def unit(self, options: Sequence[UnitOption]) -> int:
        """Adds a unit; its number."""
        assert options, "a unit without options"
        self.options.append(options)
        self.counts.append(0)
        return len(self.options) - 1

    def flow(
        self, key: object, maker: Port, readers: Iterable[Port], made: Callable[..., ValueFlow]
    ) -> None:
        """Adds the flow `made(maker, readers)`, or one more occurrence of an equal one."""
        ports = tuple(sorted(set(readers)))
        name = (key, maker, ports)
        if name not in self.flows:
            self.flows[name] = made(maker, ports)
        self.flows[name].count += 1


class InfeasiblePlacement(AssertionError):
    """No assignment satisfies the program; an all-replicated one always should."""


class IntegerProgram:
    """Columns and rows of the integer program over the units' options."""

    # chosen: bytes sent, moves below which are paid per reader; after which the best so far counts
    SHARED_MOVE: ClassVar[float] = 1.0
    SECONDS: ClassVar[float] = 120.0

    def __init__(self, problem: PlacementProblem, allowed: Mapping[int, Sequence[int]]) -> None:
        self.problem = problem
        self.cost: list[float] = []
        self.integer: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []
        self.x: list[dict[int, int]] = []  # of each unit: option -> column
        for i, options in enumerate(problem.options):
            kept = allowed.get(i, range(len(options)))
            columns = {k: self.column(0.0, integer=True) for k in kept}
            self.x.append(columns)
            self.row(dict.fromkeys(columns.values(), 1.0), 1, 1)

    def column(self, cost: float, integer: bool = False) -> int:
        """Adds a variable between 0 and 1; its number."""
        self.cost.append(cost)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        """Adds a constraint: low <= sum of the columns times their terms <= high."""
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def by_state(self, unit: int, place: int, made: bool) -> dict[Placement, list[int]]:
        """Columns of a unit's options by the state they make or read."""
        columns: dict[Placement, list[int]] = {}
        for k, column in self.x[unit].items():
            option = self.problem.options[unit][k]
            columns.setdefault((option.makes if made else option.reads)[place], []).append(column)
        return columns

    def add_costs(self, cost: Callable[[UnitOption], float]) -> None:
        for i, columns in enumerate(self.x):
            for k, column in columns.items():
                self.cost[column] = cost(self.problem.options[i][k]) * self.problem.counts[i]

    def add_flow(self, flow: ValueFlow, priced: bool) -> None:
        """Columns and constraints of a value's moves from its maker to its readers."""
        made = self.by_state(*flow.maker, made=True)
        price = cache(flow.move_price)
        shared: dict[tuple[Placement, Placement], int] = {}
        for reader in flow.readers:
            read = self.by_state(*reader, made=False)
            out: dict[Placement, dict[int, float]] = {a: {} for a in made}
            into: dict[Placement, dict[int, float]] = {b: {} for b in read}
            for a, b in product(made, read):
                cost = price(a, b)
                if cost is None:
                    continue
                alone = len(flow.readers) == 1 or cost < self.SHARED_MOVE
                g = self.column(cost * flow.count if priced and alone else 0.0)
                out[a][g] = into[b][g] = 1.0
                if priced and not alone:
                    if (a, b) not in shared:
                        shared[a, b] = self.column(cost * flow.count)
                    self.row({shared[a, b]: 1.0, g: -1.0}, 0, np.inf)
            self._balance(out, made)
            self._balance(into, read)

    def _balance(
        self, flows: dict[Placement, dict[int, float]], options: dict[Placement, list[int]]
    ) -> None:
        """What flows out of, or into, each state is the sum of the options that have it."""
        for state, columns in options.items():
            self.row({**flows[state], **dict.fromkeys(columns, -1.0)}, 0, 0)

    def solve(self) -> list[int]:
        # imported late: without a tensor degree there is nothing to solve
        """The chosen option of each unit."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        cost = np.array(self.cost)
        scale = max(float(np.abs(cost).max(initial=0.0)), 1e-9) / 1e4
        data = [(v, i, c) for i, row in enumerate(self.rows) for c, v in row.items()]
        values, i, c = (np.array(t) for t in zip(*data, strict=True))
        matrix = csr_array((values, (i, c)), shape=(len(self.rows), len(cost)))
        answer = milp(
            cost / scale,
            integrality=np.array(self.integer),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(self.low), np.array(self.high)),
            options={"mip_rel_gap": 0.0, "time_limit": self.SECONDS},
        )
        if answer.x is None:
            raise InfeasiblePlacement(f"placements: {answer.message}")
        return [max(columns, key=lambda k: answer.x[columns[k]]) for columns in self.x]


def choose(problem: PlacementProblem, must_shard: Callable[[int], bool]) -> list[int]:
    """The options of least price among those that shard the most bytes of what `must_shard`."""
    if all(len(options) == 1 for options in problem.options):
        return [0] * len(problem.options)
    first = IntegerProgram(problem, {})
    first.add_costs(lambda option: option.held_bytes)
    for flow in problem.flows.values():
        if flow.rigid:
            first.add_flow(flow, priced=False)
    finest = first.solve()
    allowed = {}
    for i, options in enumerate(problem.options):
        if must_shard(i):
            least = options[finest[i]].held_bytes
            allowed[i] = [k for k, o in enumerate(options) if o.held_bytes <= least]
    second = IntegerProgram(problem, allowed)
    second.add_costs(lambda option: option.price)
    for flow in problem.flows.values():
        second.add_flow(flow, priced=True)
    return second.solve()
