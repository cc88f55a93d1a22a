"""Boxes: pictures of transfers, and laws on random boxes."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from synchromesh.values.boxes import (
    Box,
    BoxCopy,
    difference,
    full_box,
    intersection,
    join_dim,
    lent,
    local_shape,
    place,
    split,
    transfer,
    volume,
)
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, Placement, shard


def held(shape: tuple[int, ...], layout: Layout, placement: Placement) -> list[tuple[Box, ...]]:
    """The boxes of every rank for a tensor under a layout."""
    return [
        placement.boxes(shape, layout.tensor, layout.tensor_index(p))
        for p in range(layout.devices)
    ]


def picture(pieces: tuple[BoxCopy, ...], target: int, shape: tuple[int, int]) -> str:
    """Who sends each element to `target`: its source, or a dot where nothing arrives."""
    grid = [["."] * shape[1] for _ in range(shape[0])]
    for piece in pieces:
        if piece.target == target:
            for i, j in elements(piece.box):
                assert grid[i][j] == ".", "arrives twice"
                grid[i][j] = str(piece.source)
    return "\n".join(" ".join(line) for line in grid)


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, b) for a, b in box)))


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_columns_become_rows() -> None:
    have = held((4, 4), Layout(1, 2), shard(1))
    want = held((4, 4), Layout(1, 2), shard(0))
    pieces = transfer(have, want)
    assert picture(pieces, 0, (4, 4)) == drawn("""
        0 0 1 1
        0 0 1 1
        . . . .
        . . . .""")
    assert picture(pieces, 1, (4, 4)) == drawn("""
        . . . .
        . . . .
        0 0 1 1
        0 0 1 1""")


def test_fused_segments_become_whole() -> None:
    """A fused q-k-v weight of 6 rows, in three segments over two ranks, then replicated."""
    have = held((6, 2), Layout(1, 2), shard(0, 3))
    pieces = transfer(have, held((6, 2), Layout(2, 1), REPLICATED))
    for rank in (0, 1):
        assert picture(pieces, rank, (6, 2)) == drawn("""
            0 0
            1 1
            0 0
            1 1
            0 0
            1 1""")


def test_replicas_share_the_sending() -> None:
    """Hybrid 2 x 2 becomes data 4 x 1: each rank lacks a half that two ranks hold."""
    pieces = transfer(held((4, 2), Layout(2, 2), shard(0)), held((4, 2), Layout(4, 1), REPLICATED))
    sent = [sum(volume(p.box) for p in pieces if p.source == r and not p.stays) for r in range(4)]
    assert sent == [4, 4, 4, 4]


def test_nothing_moves_when_data_becomes_tensor() -> None:
    pieces = transfer(held((8, 8), Layout(4, 1), REPLICATED), held((8, 8), Layout(1, 4), shard(0)))
    assert len(pieces) == 4 and all(p.stays for p in pieces)


def test_scalars_and_empty_tensors() -> None:
    assert transfer([[()], []], [[()], [()]]) == (BoxCopy(0, 0, ()), BoxCopy(0, 1, ()))
    assert transfer([[((0, 0),)], []], [[], [((0, 0),)]]) == ()


def test_a_box_nobody_holds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rank holds \(\(2, 4\),\) of the wanted box"):
        transfer([[((0, 2),)], []], [[], [((0, 4),)]])


LAYOUTS = [
    Layout(d, t) for d, t in ((1, 1), (4, 1), (1, 4), (2, 2), (1, 2), (2, 1), (1, 6), (3, 2))
]
PLACEMENTS = [REPLICATED, shard(0), shard(1), shard(0, 2), shard(1, 3)]
SHAPE = (24, 36)


@st.composite
def sides(draw: st.DrawFn) -> list[tuple[Box, ...]]:
    layout, placement = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(PLACEMENTS))
    order = draw(st.permutations(range(6)))
    boxes = held(SHAPE, layout, placement) + [()] * (6 - layout.devices)
    return [boxes[r] for r in order]


@settings(max_examples=60, deadline=None)
@given(sides(), sides())
def test_laws_on_layouts(have: list[tuple[Box, ...]], want: list[tuple[Box, ...]]) -> None:
    check_laws(have, want)


@st.composite
def partition(draw: st.DrawFn, shape: tuple[int, int], ranks: int) -> list[list[Box]]:
    """Rows cut at random places, each strip's columns cut again, given to one or more ranks."""
    out: list[list[Box]] = [[] for _ in range(ranks)]
    for rows in runs(draw, shape[0]):
        for columns in runs(draw, shape[1]):
            for r in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                out[r].append((rows, columns))
    return out


def runs(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)))
    return list(itertools.pairwise([0, *cuts, length]))


@settings(max_examples=60, deadline=None)
@given(partition((6, 7), 3), partition((6, 7), 3))
def test_laws_on_random_boxes(have: list[list[Box]], want: list[list[Box]]) -> None:
    check_laws(have, want)


def check_laws(have: list, want: list) -> None:  # type: ignore[type-arg]
    pieces = transfer(have, want)
    for rank, boxes in enumerate(want):
        arriving = [p for p in pieces if p.target == rank]
        wanted = set().union(*(elements(b) for b in boxes))
        got = set().union(*(elements(p.box) for p in arriving))
        assert got == wanted, "every wanted element arrives, nothing else does"
        assert sum(volume(p.box) for p in arriving) == len(wanted), "and only once"
        owned = set().union(*(elements(b) for b in have[rank]))
        moved = set().union(*(elements(p.box) for p in arriving if not p.stays))
        assert not moved & owned, "nothing moves that is already there"
    for piece in pieces:
        assert any(intersection(piece.box, b) == piece.box for b in have[piece.source]), "its own"
    assert pieces == transfer(have, want), "deterministic"
    # Ranks that hold the same send the same, up to one piece.
    sent = [
        sum(volume(p.box) for p in pieces if p.source == r and not p.stays)
        for r in range(len(have))
    ]
    largest = max((volume(p.box) for p in pieces if not p.stays), default=0)
    for a, b in itertools.combinations(range(len(have)), 2):
        wants_alike = sorted(want[a]) == sorted(want[b])
        if have[a] and sorted(have[a]) == sorted(have[b]) and wants_alike:
            assert abs(sent[a] - sent[b]) <= largest


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_difference_and_intersection_divide_a_box(data: st.DataObject) -> None:
    side = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(lambda p: (min(p), max(p)))
    a, b = (tuple(data.draw(side) for _ in range(3)) for _ in "ab")
    parts = [*difference(a, b), *filter(None, [intersection(a, b)])]
    assert sum(map(volume, parts)) == volume(a) == len(set().union(*map(elements, parts), set()))
    assert prod(b - a for a, b in a) == volume(a)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 50))
def test_split_tiles_a_box_in_small_parts(sizes: list[int], most: int) -> None:
    box = tuple((i, i + n) for i, n in enumerate(sizes))
    parts = split(box, most)
    assert sum(map(volume, parts)) == volume(box)
    assert all(volume(p) <= most for p in parts)
    assert not any(intersection(a, b) for a, b in itertools.combinations(parts, 2))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    """The shape of a tensor, and the boxes of a rank under a random placement."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dim, size = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
    segments = draw(st.sampled_from([n for n in (1, 2, 3) if shape[dim] % n == 0]))
    return shape, shard(dim, segments).boxes(shape, size, draw(st.integers(0, size - 1)))


@settings(max_examples=100, deadline=None)
@given(tensors(), st.data())
def test_places_of_boxes_are_those_of_a_tensor_joined_of_them(
    tensor: tuple[tuple[int, ...], tuple[Box, ...]], data: st.DataObject
) -> None:
    shape, boxes = tensor
    whole = torch.arange(volume(full_box(shape))).view(shape)
    parts = [whole[tuple(slice(a, b) for a, b in box)] for box in boxes]
    local = torch.cat(parts, join_dim(boxes))
    assert tuple(local.shape) == local_shape(boxes, len(shape))
    cut = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in shape))
    wanted = tuple((min(pair), max(pair)) for pair in data.draw(cut))
    for outer in boxes:
        shared = intersection(outer, wanted)
        if shared is not None:
            there = local[tuple(slice(at, at + n) for at, n in place(shared, boxes))]
            assert there.equal(whole[tuple(slice(a, b) for a, b in shared)])


def test_a_place_outside_of_all_boxes_is_refused() -> None:
    with pytest.raises(AssertionError, match="is in none of"):
        place(((3, 5),), [((0, 4),), ((6, 8),)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.data())
def test_what_one_host_alone_has_another_one_keeps(hosts: list[str], data: st.DataObject) -> None:
    of = hosts if len({*hosts}) > 1 else [*map(str, range(len(hosts)))]
    ends = st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted)
    have = [(((a, b),),) for a, b in (data.draw(ends) for _ in hosts)]
    kept = lent(have, hosts)
    for row in range(6):
        owners, keepers = (
            {of[r] for r, side in enumerate(sides) if any(a <= row < b for ((a, b),) in side)}
            for sides in (have, kept)
        )
        alone = len(owners) == 1 and len({*of}) > 1
        assert len(keepers) == alone and not keepers & owners
