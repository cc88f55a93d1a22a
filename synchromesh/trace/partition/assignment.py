"""The choice of placements: one integer program for a whole step, solved exactly by HiGHS.

Units (operators, parameters, border values) each take one of their options; an option names the
state of every tensor the unit reads and makes. Between the unit that makes a value and each
unit that reads it flows

    g[a, b] >= 0       the value is made in state a and read in state b
    sum over b of g[a, b] = options of the maker that make a
    sum over a of g[a, b] = options of the reader that read b

With these flows the linear relaxation is nearly integral (products `y >= x_a + x_b - 1` instead
take minutes). A move from a to b is paid once for all readers: M[a, b] >= g[a, b] of each.

Two steps, because replicating everything needs no traffic at all: first the fewest parameter
bytes a rank must hold; then the least price with every parameter of weight as finely sharded as
that (see `Price.small`).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from synchromesh.values.placement import Placement
from synchromesh.values.traffic import Collective, sent_bytes

SHARED = 1.0  # moves below this price are paid per reader: not worth a variable


@dataclass(frozen=True)
class Price:
    """What things cost, in bytes sent; a measured profile may give other numbers.

    Sent bytes are what counts; the other prices break ties between assignments of equal traffic.
    """

    byte: float = 1.0  # a byte sent
    latency: float = 1024.0  # a collective: 50 us at 20 MB/s, little beside any activation
    flop: float = 1e-5  # an operation, so that free sharding of compute is taken
    held_byte: float = 1e-3  # a parameter byte held: what is sharded for nothing is sharded
    local_byte: float = 1e-5  # a byte of a value that is sliced, padded or divided without traffic
    partial_byte: float = 1e-4  # ... of an activation made partial: the division costs a pass
    small: tuple[float, float] = (0.04, 1e-4)
    # a parameter below these parts of its component's or of all parameter bytes need not be
    # sharded if that costs traffic: norms and biases

    def collectives(self, found: Sequence[Collective], rows: float) -> float:
        sent = sum(
            sent_bytes(c.kind, round(c.bytes_per_row * rows + c.fixed_bytes), c.ranks)
            for c in found
        )
        return self.byte * sent + self.latency * len(found)


@dataclass(frozen=True)
class Option:
    """One way to run a unit: states it reads (by slot) and makes (by output), its price, bytes
    held."""

    reads: tuple[Placement, ...]
    makes: tuple[Placement, ...]
    price: float = 0.0
    held: float = 0.0


MovePrice = Callable[[Placement, Placement], float | None]  # None: not allowed


@dataclass
class Link:
    """A value: who makes it, who reads it, what a move of it costs, how often the same link
    occurs."""

    maker: tuple[int, int]  # unit, output
    readers: tuple[tuple[int, int], ...]  # unit, slot
    price: MovePrice
    count: int = 1
    rigid: bool = False  # some moves are forbidden: matters in the first step too
    crosses: bool = False  # to another degree, which costs traffic in an equal state too


@dataclass
class Problem:
    """All units and links of a step."""

    options: list[Sequence[Option]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    links: dict[object, Link] = field(default_factory=dict)

    def unit(self, options: Sequence[Option]) -> int:
        assert options, "a unit without options"
        self.options.append(options)
        self.counts.append(0)
        return len(self.options) - 1

    def link(
        self,
        key: object,
        maker: tuple[int, int],
        readers: Sequence[tuple[int, int]],
        price: MovePrice,
        rigid: bool,
        crosses: bool = False,
    ) -> None:
        """Adds a link, or one more occurrence of an equal one."""
        ordered = tuple(sorted(set(readers)))
        full = (key, maker, ordered)
        if full in self.links:
            self.links[full].count += 1
        else:
            self.links[full] = Link(maker, ordered, price, 1, rigid, crosses)


class Infeasible(AssertionError):
    """No assignment satisfies the program; an all-replicated one always should."""


class _Program:
    """Columns and rows of the integer program over the units' options."""

    def __init__(self, problem: Problem, allowed: Mapping[int, Sequence[int]]) -> None:
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
        self.cost.append(cost)
        self.integer.append(int(integer))
        return len(self.cost) - 1

    def row(self, terms: dict[int, float], low: float, high: float) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def by_state(self, unit: int, place: int, made: bool) -> dict[Placement, list[int]]:
        """Columns of a unit's options by the state they make or read."""
        found: dict[Placement, list[int]] = {}
        for k, column in self.x[unit].items():
            option = self.problem.options[unit][k]
            found.setdefault((option.makes if made else option.reads)[place], []).append(column)
        return found

    def flows(self, link: Link, priced: bool) -> None:
        made = self.by_state(*link.maker, made=True)
        shared: dict[tuple[Placement, Placement], int] = {}
        prices: dict[tuple[Placement, Placement], float | None] = {}
        for reader in link.readers:
            read = self.by_state(*reader, made=False)
            out: dict[Placement, dict[int, float]] = {a: {} for a in made}
            into: dict[Placement, dict[int, float]] = {b: {} for b in read}
            for a in made:
                for b in read:
                    if (a, b) not in prices:
                        free = a == b and not link.crosses
                        prices[a, b] = 0.0 if free else link.price(a, b)
                    price = prices[a, b]
                    if price is None:
                        continue
                    each = len(link.readers) == 1 or price < SHARED
                    g = self.column(price * link.count if priced and each else 0.0)
                    out[a][g] = into[b][g] = 1.0
                    if priced and not each:
                        if (a, b) not in shared:
                            shared[a, b] = self.column(price * link.count)
                        self.row({shared[a, b]: 1.0, g: -1.0}, 0, np.inf)
            for flows, columns in ((out, made), (into, read)):
                for state in columns:
                    self.row({**flows[state], **dict.fromkeys(columns[state], -1.0)}, 0, 0)

    def solve(self) -> list[int]:
        """The chosen option of each unit."""
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
            options={"mip_rel_gap": 0.0, "time_limit": 120.0},
        )
        if answer.x is None:
            raise Infeasible(f"placements: {answer.message}")
        return [max(columns, key=lambda k: answer.x[columns[k]]) for columns in self.x]


def choose(problem: Problem, weighty: Callable[[int], bool]) -> list[int]:
    """The option of each unit: the least price among those that shard the most parameter bytes.

    weighty: whether the parameter that is unit i must be as finely sharded as possible.
    """
    problem_counts = problem.counts
    first = _Program(problem, {})
    for i, columns in enumerate(first.x):
        for k, column in columns.items():
            first.cost[column] = problem.options[i][k].held * problem_counts[i]
    for link in problem.links.values():
        if link.rigid:
            first.flows(link, priced=False)
    finest = first.solve()
    allowed = {}
    for i, options in enumerate(problem.options):
        if weighty(i):
            least = options[finest[i]].held
            allowed[i] = [k for k, o in enumerate(options) if o.held <= least]
    second = _Program(problem, allowed)
    for i, columns in enumerate(second.x):
        for k, column in columns.items():
            second.cost[column] = problem.options[i][k].price * problem_counts[i]
    for link in problem.links.values():
        second.flows(link, priced=True)
    return second.solve()


def sample(problem: Problem, chance: random.Random, most: int = 100_000) -> list[int]:
    """A random valid assignment: operators take random options, parameters one that fits.

    Where nothing fits, the unit takes any option and its neighbours draw again.
    """
    options = problem.options
    links: list[list[tuple[Link, tuple[int, int]]]] = [[] for _ in options]
    makers: set[int] = set()
    for link in problem.links.values():
        if link.rigid:
            makers.add(link.maker[0])
            for reader in link.readers:
                links[link.maker[0]].append((link, reader))
                links[reader[0]].append((link, reader))
    taken: dict[int, int] = {}

    def fits(unit: int, k: int) -> bool:
        for link, reader in links[unit]:
            first, last = link.maker[0], reader[0]
            if (first != unit and first not in taken) or (last != unit and last not in taken):
                continue
            a = options[first][k if first == unit else taken[first]].makes[link.maker[1]]
            b = options[last][k if last == unit else taken[last]].reads[reader[1]]
            if (a != b or link.crosses) and link.price(a, b) is None:
                return False
        return True

    waiting = sorted(range(len(options)), key=lambda i: (i not in makers, chance.random()))
    for _ in range(most):
        if not waiting:
            return [taken[i] for i in range(len(options))]
        unit = waiting.pop()
        fitting = [k for k in range(len(options[unit])) if fits(unit, k)]
        if not fitting:  # its neighbours disagree: they draw again, after it
            around = {i for link, reader in links[unit] for i in (link.maker[0], reader[0])} - {
                unit
            }
            for other in sorted(around):
                if taken.pop(other, None) is not None:
                    waiting.append(other)
            fitting = list(range(len(options[unit])))
        taken[unit] = chance.choice(fitting)
    raise Infeasible("no random assignment found")
