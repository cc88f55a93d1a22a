"""The same problem as an integer program for HiGHS: slower than the search, and its oracle.

    x[i, o] in {0, 1}     component i takes option o                      sum over o of x[i, o] = 1
    y[l, j, a, f] >= 0    link l leaves its source with border a, and target j wants form f
                          sum over f = x of the source's options of border a
                          sum over a = x of the target's options that want f
    M[l, a, f] >= y[l, j, a, f]  for every target j: a form is converted once
    t_i  = t_(i+1) + sum of backward x + sum of backward prices M of the links from i
    N_i >= t_i + sum of gradient x,    N_i >= N_(i+1) + sum of gradient x
    least  sum of (forward + update) x + sum of forward prices M + end,    end >= t, end >= N_0
    sum of memory x <= limit

Where a component has no gradient N_i >= t_i is more than the definition asks, and changes nothing:
the end is no earlier than t. With the flows y the linear relaxation is nearly integral. HiGHS
proves optimality within its tolerances, about 1e-6 of the step time."""

import math
from collections.abc import Callable, Mapping
from itertools import chain

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from synchromesh.planner.chain.problem import BATCH, ChainPlan, PricedEdge, Problem


class _IntegerProgram:
    """Columns and rows; a row is a sum of columns within two numbers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.high: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []
        least = (
            min(o.forward + o.backward + o.gradient + o.update for o in options)
            for options in problem.components
        )
        self.scale = sum(least) or 1.0  # s; seconds and bytes become numbers around 1
        self.unit = max(1, *(o.memory for options in problem.components for o in options))  # bytes
        self.x = [[self.column(1.0) for _ in options] for options in problem.components]
        self.integers = len(self.high)
        for columns in self.x:
            self.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
        self.forward: dict[int, float] = {}  # seconds by column
        self.backward: dict[int, dict[int, float]] = {}  # by source: seconds by column
        for link in problem.links:
            self.link(link)

    def column(self, high: float) -> int:
        self.high.append(high)
        return len(self.high) - 1

    def row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self.rows.append((dict(terms), low, high))

    def link(self, link: PricedEdge) -> None:
        """Flows from the source's border to the form that each target wants."""
        made: dict[int, list[int]] = {0: []}
        if link.source != BATCH:
            made = self._columns(link.source, lambda border: border)
        paid: dict[tuple[int, int], int] = {}
        for target in link.targets:
            read = self._columns(target, lambda border: link.prices.form[border])
            out: dict[int, dict[int, float]] = {a: {} for a in made}
            into: dict[int, dict[int, float]] = {f: {} for f in read}
            for a in made:
                for f in read:
                    price = link.prices.forward[a, f] + link.prices.backward[a, f]
                    if price == math.inf:
                        continue
                    flow = self.column(1.0)
                    out[a][flow] = into[f][flow] = 1.0
                    if price > 0:
                        if (a, f) not in paid:
                            paid[a, f] = self.column(1.0)
                        self.row({paid[a, f]: 1.0, flow: -1.0}, 0.0, math.inf)
            total = float(link.source == BATCH)
            for a, columns in made.items():
                self.row({**out[a], **dict.fromkeys(columns, -1.0)}, total, total)
            for f, columns in read.items():
                self.row({**into[f], **dict.fromkeys(columns, -1.0)}, 0.0, 0.0)
        for (a, f), column in paid.items():
            self.forward[column] = float(link.prices.forward[a, f])
            self.backward.setdefault(link.source, {})[column] = float(link.prices.backward[a, f])

    def _columns(self, i: int, name: Callable[[int], int]) -> dict[int, list[int]]:
        """Columns of a component's options by what their border is called."""
        by_name: dict[int, list[int]] = {}
        for option, column in zip(self.problem.components[i], self.x[i], strict=True):
            by_name.setdefault(name(option.border), []).append(column)
        return by_name

    def clocks(self) -> dict[int, float]:
        """The rows of both clocks; the objective by column, in units of `scale`."""
        unit = 1 / self.scale
        cost = {column: seconds * unit for column, seconds in self.forward.items()}
        compute: int | None = None
        network: int | None = None
        for i in reversed(range(len(self.x))):
            pairs = list(zip(self.x[i], self.problem.components[i], strict=True))
            cost |= {x: (o.forward + o.update) * unit for x, o in pairs}
            back = {x: -o.backward * unit for x, o in pairs}
            compute = self._after(compute, back | self._paid(i))
            gradient = {x: -o.gradient * unit for x, o in pairs}
            before, network = network, self.column(math.inf)
            for clock in (compute, before):
                if clock is not None:
                    self.row({network: 1.0, clock: -1.0, **gradient}, 0.0, math.inf)
        compute = self._after(compute, self._paid(BATCH))
        end = self.column(math.inf)
        for clock in (compute, network):
            if clock is not None:
                self.row({end: 1.0, clock: -1.0}, 0.0, math.inf)
        return cost | {end: 1.0}

    def _paid(self, source: int) -> dict[int, float]:
        return {c: -s / self.scale for c, s in self.backward.get(source, {}).items()}

    def _after(self, clock: int | None, terms: dict[int, float]) -> int:
        """A new clock: the old one plus these (negated) terms."""
        new = self.column(math.inf)
        old = {} if clock is None else {clock: -1.0}
        self.row({new: 1.0, **old, **terms}, 0.0, 0.0)
        return new

    def solve(self, cost: Mapping[int, float]) -> tuple[int, ...] | None:
        data = [(v, r, c) for r, (terms, _, _) in enumerate(self.rows) for c, v in terms.items()]
        values, r, c = (np.array(column) for column in zip(*data, strict=True))
        matrix = csr_array((values, (r, c)), shape=(len(self.rows), len(self.high)))
        low, high = (np.array([row[k] for row in self.rows]) for k in (1, 2))
        vector = np.zeros(len(self.high))
        vector[list(cost)] = list(cost.values())
        integral = np.zeros(len(self.high), dtype=np.int64)
        integral[: self.integers] = 1
        answer = milp(
            vector,
            integrality=integral,
            bounds=Bounds(0, np.array(self.high)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 0.0, "time_limit": 600.0},  # seconds
        )
        if answer.x is None:
            return None
        return tuple(int(np.argmax(answer.x[columns])) for columns in self.x)


def quickest(problem: Problem, limit: float) -> ChainPlan | None:
    """The plan of least step time within the limit, None where there is none."""
    program = _IntegerProgram(problem)
    cost = program.clocks()
    if limit < math.inf:
        columns = chain.from_iterable(program.x)
        options = chain.from_iterable(problem.components)
        memory = {x: o.memory / program.unit for x, o in zip(columns, options, strict=True)}
        program.row(memory, 0.0, limit / program.unit)
    choice = program.solve(cost)
    return ChainPlan.of(problem, choice) if choice is not None else None
