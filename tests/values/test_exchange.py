"""Exchanges as boxes: who sends what to whom, without tensors on ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from synchromesh.values.boxes import local_shape
from synchromesh.values.exchange import Change, Ranges, Side, Slices, nested, routes
from synchromesh.values.placement import PARTIAL, REPLICATED, shard


def test_routes_as_drawn() -> None:
    source = Side(1, ((0, 2), (2, 4), (4, 6), (6, 8)), REPLICATED)
    target = Side(2, ((0, 4), (4, 8)), REPLICATED)
    assert nested(source, target) == 2 and nested(target, source) == 0
    moves = {
        (r.sender, r.receiver, *at, *to)
        for r in routes(source, target, ())
        for at, to in r.parts
        if r.sender != r.receiver
    }
    both = (0, 2)  # first row, number of rows at the sender
    assert moves == {
        (1, 0, both, (2, 2)), (0, 1, both, (0, 2)), (3, 2, both, (2, 2)), (2, 3, both, (0, 2))
    }  # fmt: skip


def test_a_gap_and_an_empty_block_meet_nothing() -> None:
    have, want = ((0, 2), (2, 2), (2, 6)), ((0, 1), (0, 1), (5, 9), (9, 9))
    a, b = (Side(1, rows, REPLICATED) for rows in (have, want))
    assert [(r.sender, r.receiver) for r in routes(a, b, ())] == [(0, 0), (0, 1), (2, 2)]


@pytest.mark.parametrize("first", [0, 1, 5, 6, 7, 12])
@pytest.mark.parametrize("tensor", [(1, 1), (2, 3), (4, 2)])
def test_stages_further_ahead_send_what_they_would_anywhere(
    first: int, tensor: tuple[int, int]
) -> None:
    """Routes are worked out for the first stages and moved on; who sends depends on positions."""
    rows = ((0, 3), (3, 6)), ((0, 2), (2, 4), (4, 6))
    starts = first, first + 2 * tensor[0]
    a, b = (
        Side(*side, REPLICATED, first=at)
        for side, at in zip(zip(tensor, rows, strict=True), starts, strict=True)
    )
    for source, target in ((a, b), (b, a)):
        found = [(r.sender, r.receiver) for r in routes(source, target, ())]
        meeting = [
            (i, j)
            for i, have in enumerate(source.rows)
            for j, want in enumerate(target.rows)
            if max(have[0], want[0]) < min(have[1], want[1])
        ]
        assert found == [
            (source.line(i)[p % source.tensor], p) for i, j in meeting for p in target.line(j)
        ]


def test_rows_nest_only_where_blocks_are_equal_and_meet() -> None:
    coarse = Side(2, ((0, 4), (4, 8)), REPLICATED)
    assert nested(Side(1, ((0, 3), (3, 4), (4, 6), (6, 8)), REPLICATED), coarse) == 0
    without = Side(1, ((0, 0),) * 4, REPLICATED), Side(2, ((0, 0),) * 2, REPLICATED)
    assert nested(*without) == 0
    assert nested(Side(1, ((0, 2), (2, 4), (4, 6)), REPLICATED), coarse) == 0


ROWS, WIDTHS = 6, {1: 4, 2: 12}  # of the value that changes its layout


@st.composite
def sides(draw: st.DrawFn) -> Side:
    """Any layout on four positions, and any placement; some positions may have no rows."""
    tensor = draw(st.sampled_from((1, 2, 4)))
    cuts = sorted(draw(st.integers(0, ROWS)) for _ in range(4 // tensor - 1))
    rows: Ranges = tuple(pairwise((0, *cuts, ROWS)))
    placement = draw(st.sampled_from((REPLICATED, PARTIAL, shard(1), shard(2), shard(2, 3))))
    return Side(tensor, rows, placement, WIDTHS.get(placement.dim, 0))


def held(side: Side, whole: Tensor, position: int) -> Tensor:
    """What a position has of the value; of a partial one its term of the sum."""
    boxes = side.boxes(position, tuple(WIDTHS.items()))
    parts = [whole[tuple(slice(a, b) for a, b in box)] for box in boxes]
    joined = torch.cat(parts, side.placement.dim if side.placement.sharded else 0)
    assert tuple(joined.shape) == local_shape(boxes, 3)
    if side.placement.kind == "P":
        joined = joined / side.tensor + (position % side.tensor - (side.tensor - 1) / 2)
    return joined


def cut_out(x: Tensor, change: Change, slices: Slices) -> Tensor:
    for dim, (first, length) in zip(change.cut, slices, strict=True):
        x = x.narrow(dim, first, length)
    return x


@settings(max_examples=200, deadline=None)
@given(sides(), sides())
def test_what_arrives_on_all_routes_is_the_value_on_the_other_side(a: Side, b: Side) -> None:
    whole = torch.arange(float(ROWS * 4 * 12), dtype=torch.float64).view(ROWS, 4, 12)
    change = Change(a, b)
    arrived = {p: torch.zeros_like(held(b, whole, p)) for p in range(4)}
    times = {p: torch.zeros_like(x) for p, x in arrived.items()}
    for route in change.routes:
        given = held(a, whole, route.sender)
        for at, to in route.parts:
            cut_out(arrived[route.receiver], change, to).add_(cut_out(given, change, at))
            cut_out(times[route.receiver], change, to).add_(1)
    if b.placement.kind == "P":  # the sum over the ranks of a line is the value
        for line in map(b.line, range(len(b.rows))):
            expected = whole[slice(*b.range_at(line[0]))]
            torch.testing.assert_close(sum(arrived[p] for p in line), expected)
        return
    for position, x in arrived.items():
        torch.testing.assert_close(x, held(b, whole, position))
        terms = a.tensor if a.placement.kind == "P" else 1
        assert (times[position] == terms).all()


@settings(max_examples=100, deadline=None)
@given(sides(), sides())
def test_a_whole_route_carries_all_that_both_ends_have(a: Side, b: Side) -> None:
    change = Change(a, b)
    for route in change.whole:
        ((at, to),) = route.parts
        for side, position, slices in ((a, route.sender, at), (b, route.receiver, to)):
            shape = local_shape(side.boxes(position, change._dims), len(change.cut))
            assert slices == tuple((0, n) for n in shape)
