"""Exchanges between layouts: value and gradient of every combination, by the global tensors."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from synchromesh.engine.exchange import depart
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.world import World
from synchromesh.programs.collectives import part
from synchromesh.trace.partition.moves import edge_collectives
from synchromesh.values.component import Rows, Value
from synchromesh.values.exchange import Exchange
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement, parse
from synchromesh.values.traffic import TrafficCount
from tests.ranks import run

PLAIN = Value("plain", (1, 24, 24), "float64", Rows(), True)
# rows in the middle: two segments of (rows x 2) entries
INNER = Value("inner", (24, 4, 24), "float64", Rows(1, 2, 2), True)
ODD = Value("odd", (1, 7, 18), "float64", Rows(), True)
ODD_INNER = Value("odd-inner", (7, 4, 18), "float64", Rows(1, 2, 2), True)
EVEN, UNEVEN, SHORT = 12, 11, 2  # global rows: 2 rows leave data ranks without any


def exchange(*arguments: Any) -> Tensor:
    """Departure and arrival at once."""
    return depart(*arguments)()


def _ranges(rows: int, data: int) -> tuple[tuple[int, int], ...]:
    """Rows dealt out as evenly as can be, the first ranks one more; later ones may be empty."""
    ends = [0]
    for d in range(data):
        ends.append(ends[-1] + rows // data + (d < rows % data))
    return tuple(pairwise(ends))


@dataclass(frozen=True)
class Case:
    devices: int
    source: int  # tensor degrees
    target: int
    have: str
    want: str
    rows: int
    value: Value

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        k = self.devices
        return Layout(k // self.source, self.source), Layout(k // self.target, self.target)

    def sharded(self, how: str) -> Placement:
        """S(1) and S(2) mean the first and second dimension besides the rows."""
        placement = parse(how)
        if placement.sharded and self.value in (INNER, ODD_INNER) and placement.dim == 1:
            return placement.at(0)
        return placement


def _global(value: Value, rows: int, seed: int) -> Tensor:
    shape = list(value.shape)
    if value.rows is not None:
        shape[value.rows.dim] *= rows
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _take(x: Tensor, value: Value, rows: int, start: int, stop: int) -> Tensor:
    r = value.rows
    apart = x.unflatten(r.dim, (r.segments, rows, r.inner)).narrow(r.dim + 1, start, stop - start)
    return apart.flatten(r.dim, r.dim + 2)


def _hold(whole: Tensor, how: Placement, size: int, index: int) -> Tensor:
    """What one rank of a line holds; partial values differ by terms that add up to zero."""
    if how.sharded:
        return part(whole, how, size, index).clone()
    if how.kind == "P":
        return whole / size + (index - (size - 1) / 2)
    return whole.clone()


def _stand_in(case: Case, how: Placement, size: int, index: int) -> Tensor:
    shape = how.local_shape(case.value.shape, size, index)
    return torch.full(shape, 1e3, dtype=torch.float64)


def _local(case: Case, whole: Tensor, how: Placement, layout: Layout, position: int) -> Tensor:
    start, stop = _ranges(case.rows, layout.data)[layout.data_index(position)]
    if start == stop:
        return _stand_in(case, how, layout.tensor, layout.tensor_index(position))
    rows = _take(whole, case.value, case.rows, start, stop)
    return _hold(rows, how, layout.tensor, layout.tensor_index(position))


GRADIENT = {"R": "R", "r": "P", "P": "R"}


def _exchanges(cases: list[Case]) -> list[tuple[Tensor, Tensor, int]]:
    world = World.open("cpu")
    ranks = tuple(range(world.size))
    degrees = {d for c in cases for d in (c.source, c.target)}
    groups = PlanGroups(world, ranks, [Layout(world.size // d, d) for d in degrees])
    for d in degrees:
        world.choices[groups.tensor_group(Layout(world.size // d, d)).ranks] = "all-to-all"
    answers = []
    for case in cases:
        value, gradient = _global(case.value, case.rows, 1), _global(case.value, case.rows, 2)
        source, target = case.layouts
        have, want = case.sharded(case.have), case.sharded(case.want)
        held = have if have.sharded else parse({"r": "R"}.get(case.have, case.have))
        x = _local(case, value, held, source, world.rank).requires_grad_()
        world.ledger.reset()
        item = Exchange(case.value, have, want, source, target)
        y = exchange(x, item, groups, partial(_ranges, case.rows))
        arriving = want if want.sharded else parse(GRADIENT[case.want])
        dy = _local(case, gradient, arriving, target, world.rank)
        (dx,) = torch.autograd.grad(y, x, dy)
        answers.append((y.detach(), dx, world.ledger.sent))
    world.close()
    return answers


def _check(case: Case, answers: list[tuple[Tensor, Tensor, int]]) -> None:
    value, gradient = _global(case.value, case.rows, 1), _global(case.value, case.rows, 2)
    source, target = case.layouts
    have, want = case.sharded(case.have), case.sharded(case.want)

    def empty(layout: Layout, p: int) -> bool:
        start, stop = _ranges(case.rows, layout.data)[layout.data_index(p)]
        return start == stop

    for p, (y, dx, _) in enumerate(answers):
        expected = _local(case, value, want if want.sharded else REPLICATED, target, p)
        assert y.is_contiguous() and y.shape == expected.shape, case
        if empty(target, p):
            assert y.isfinite().all()
        else:
            torch.testing.assert_close(
                y, expected, atol=1e-12, rtol=0, msg=lambda m: f"{case}: {m}"
            )
        if have.kind == "r":  # partial: the sum over the line counts
            dx = sum(answers[q][1] for q in source.tensor_positions(p))
        expected = _local(case, gradient, have if have.sharded else REPLICATED, source, p)
        if empty(source, p):
            expected = torch.zeros_like(expected)
        torch.testing.assert_close(dx, expected, atol=1e-12, rtol=0, msg=lambda m: f"{case}: {m}")


def _every(devices: int, degrees: list[tuple[int, int]], rows: tuple[int, ...]) -> list[Case]:
    pairs = product(("R", "r", "P", "S(1)", "S(2, 2)"), ("R", "r", "S(1)", "S(2, 3)"))
    combinations = product(degrees, pairs, rows)
    return [
        Case(devices, a, b, have, want, n, (PLAIN, INNER)[i % 2])
        for i, ((a, b), (have, want), n) in enumerate(combinations)
    ]


@pytest.mark.parametrize(
    ("devices", "degrees", "rows"),
    [
        (2, [(1, 2), (2, 1)], (EVEN, UNEVEN, 1)),
        (4, [(1, 4), (4, 1), (2, 4), (4, 2)], (EVEN, UNEVEN, SHORT)),
        (4, [(1, 2), (2, 1)], (EVEN, SHORT)),
    ],
)
def test_every_combination(devices: int, degrees: Any, rows: Any) -> None:
    cases = _every(devices, degrees, rows)
    answers = run(devices, _exchanges, cases)
    for i, case in enumerate(cases):
        _check(case, [rank[i] for rank in answers])


@pytest.mark.parametrize(("devices", "degree"), [(2, 2), (4, 4), (3, 3)])
def test_every_combination_of_unequal_parts(devices: int, degree: int) -> None:
    cases = [
        Case(devices, a, b, have, want, rows, value)
        for a, b in ((1, degree), (degree, 1))
        for have in ("R", "P", "S(1)", "S(2, 1, 3)", "S(2, 2, 3)")
        for want in ("R", "r", "S(1)", "S(2, 1, 3)")
        for rows in (EVEN, UNEVEN, SHORT)
        for value in (ODD, ODD_INNER)
    ]
    answers = run(devices, _exchanges, cases)
    for i, case in enumerate(cases):
        _check(case, [rank[i] for rank in answers])


def test_degrees_that_do_not_nest() -> None:
    cases = [
        Case(6, a, b, have, want, rows, value)
        for a, b in ((2, 3), (3, 2))
        for have, want in (("R", "R"), ("P", "r"), ("S(1)", "S(2)"))
        for rows, value in ((12, PLAIN), (5, INNER), (2, PLAIN))
    ]
    answers = run(6, _exchanges, cases)
    for i, case in enumerate(cases):
        _check(case, [rank[i] for rank in answers])


def test_traffic_is_what_the_trace_predicts() -> None:
    cases = [
        Case(4, a, b, have, want, EVEN, value)
        for a, b, have, want in (
            (4, 1, "R", "R"), (4, 2, "R", "R"), (4, 1, "P", "R"), (4, 1, "S(1)", "R"),
            (1, 4, "R", "R"), (2, 4, "R", "R"), (1, 4, "R", "r"), (1, 2, "R", "S(2)"),
            (1, 4, "R", "S(1)"),
        )
        for value in (PLAIN, INNER)
    ]  # fmt: skip
    answers = run(4, _exchanges, cases)
    for i, case in enumerate(cases):
        source, target = case.layouts
        have, want = case.sharded(case.have), case.sharded(case.want)
        predicted = edge_collectives(case.value, have, want, source, target)
        assert predicted is not None
        tally = TrafficCount()
        for collective in predicted:
            payload = collective.payload(case.rows // source.data)
            tally.add(collective.kind, payload, collective.ranks)
        assert [rank[i][2] for rank in answers] == [tally.sent] * 4, case


def _without_rows() -> list[dict]:
    """A table computed by 2x2 or 1x4 and read by the other: gradients arrive whole."""
    world = World.open("cpu")
    groups = PlanGroups(world, (0, 1, 2, 3), [Layout(2, 2), Layout(1, 4), Layout(4, 1)])
    table = Value("table", (8,), "float64", None, True)
    value = torch.arange(8.0, dtype=torch.float64)
    found = []
    for a, b, have, want in product((1, 2, 4), (1, 2, 4), "RrPS", "RrS"):
        if a == b:
            continue
        source, target = Layout(4 // a, a), Layout(4 // b, b)
        placed = {"S": Placement("S", 0)}
        h, w = placed.get(have) or parse(have), placed.get(want) or parse(want)
        held = h if h.sharded else parse({"r": "R"}.get(have, have))
        x = _hold(value, held, a, world.rank % a).requires_grad_()
        y = exchange(x, Exchange(table, h, w, source, target), groups, dict)
        expected = part(value, w, b, world.rank % b) if w.sharded else value
        torch.testing.assert_close(y.detach(), expected, atol=1e-12, rtol=0)
        # each data rank of the reader makes another gradient: 1, 2, ... times (1, ..., 1)
        line = torch.full((8,), 1.0 + world.rank // b, dtype=torch.float64)
        dy = _hold(line, w if w.sharded else parse(GRADIENT[want]), b, world.rank % b)
        (dx,) = torch.autograd.grad(y, x, dy)
        found.append({"case": (a, b, have, want), "dx": dx.tolist()})
    world.close()
    return found


def test_values_without_rows_sum_their_gradients_over_everybody() -> None:
    answers = run(4, _without_rows)
    for i, first in enumerate(answers[0]):
        a, b, have, _ = first["case"]
        readers = 4 // b
        total = [readers * (readers + 1) / 2] * 8
        # what the ranks of the source add up to over all data ranks
        each = [torch.tensor(rank[i]["dx"]) for rank in answers]
        if have == "r":
            summed = sum(each)
        elif have == "S":
            summed = torch.cat([sum(each[t::a]) for t in range(a)])
        else:
            for p, dx in enumerate(each):
                torch.testing.assert_close(dx, each[p - p % a], msg=str(first["case"]))
            summed = sum(each[::a])
        torch.testing.assert_close(summed.tolist(), total, msg=str(first["case"]))


def _integers() -> None:
    world = World.open("cpu")
    groups = PlanGroups(world, (0, 1), [Layout(2, 1), Layout(1, 2)])
    ids = Value("ids", (1, 3), "int64", Rows(), False)
    mine = torch.arange(6).view(2, 3)[world.rank : world.rank + 1]
    item = Exchange(ids, REPLICATED, REPLICATED, Layout(2, 1), Layout(1, 2))
    y = exchange(mine, item, groups, {2: ((0, 1), (1, 2)), 1: ((0, 2),)}.__getitem__)
    assert y.tolist() == [[0, 1, 2], [3, 4, 5]]
    flags = Value("flags", (1, 3), "bool", Rows(), False)
    item = Exchange(flags, REPLICATED, REPLICATED, Layout(1, 2), Layout(2, 1))
    y = exchange(y > 2, item, groups, {1: ((0, 2),), 2: ((0, 2), (2, 2))}.__getitem__)
    expected = [[False] * 3, [True] * 3]
    assert y.tolist() == (expected if world.rank == 0 else expected[:1])
    world.close()


def test_integers_and_flags_move_forward() -> None:
    run(2, _integers)
