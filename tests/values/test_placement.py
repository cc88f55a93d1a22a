"""A placement: its text form and its boxes, which tile the tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.values.boxes import intersection, volume
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement, parse, shard, shard_units


def test_text_forms() -> None:
    placements = [REPLICATED, Placement("r"), PARTIAL, shard(0), shard(2, 3), shard(1, 1, 64)]
    assert [str(p) for p in placements] == ["R", "r", "P", "S(0)", "S(2, 3)", "S(1, 1, 64)"]
    assert [parse(str(p)) for p in placements] == placements


def test_segments_as_a_picture() -> None:
    """A fused q-k-v weight of 12 rows on two ranks: each holds half of every segment."""
    owner = ["?"] * 12
    for rank in range(2):
        for (start, stop), _ in shard(0, 3).boxes((12, 4), 2, rank):
            owner[start:stop] = [str(rank)] * (stop - start)
    assert " ".join(owner) == "0 0 1 1 0 0 1 1 0 0 1 1"


def test_unequal_parts_as_a_picture() -> None:
    """Three heads of two rows in each of two segments, on two ranks and on four."""
    placement = shard(0, 2, 2)
    for size, picture in ((2, "0 0 0 0 1 1 0 0 0 0 1 1"), (4, "0 0 1 1 2 2 0 0 1 1 2 2")):
        owner = ["?"] * 12
        for rank in range(size):
            for ((start, stop),) in placement.boxes((12,), size, rank):
                owner[start:stop] = [str(rank)] * (stop - start)
        assert " ".join(owner) == picture
    assert placement.local_shape((12,), 4, 3) == (0,)
    assert placement.padded_bytes(12, (12,), 2) == 16, "two times the first rank's eight rows"


def test_a_placement_has_one_form() -> None:
    assert shard(0, 1, 2).fits((10,), 2) and not shard(0, 1, 2).fits((8,), 2), "that is S(0)"
    assert not shard(0, 1, 2).fits((9,), 2) and not shard(0).fits((1,), 2)
    assert shard_units(12, 2, 0, 1, 3) == shard(0) and shard_units(9, 2, 0, 1, 3) == shard(0, 1, 3)


@given(st.integers(0, 1), *[st.integers(1, 3)] * 2, st.integers(1, 5), st.integers(2, 12))
def test_boxes_tile_the_tensor(dim: int, segments: int, unit: int, size: int, count: int) -> None:
    length = segments * unit * count
    shape = (5, length) if dim else (length, 5)
    placement = shard_units(length, size, dim, segments, unit)
    assert placement.fits(shape, size) and not placement.fits((1, 1), 2)
    boxes = [box for rank in range(size) for box in placement.boxes(shape, size, rank)]
    assert sum(map(volume, boxes)) == shape[0] * shape[1]
    assert not any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(size):
        parts = [
            whole[tuple(slice(a, b) for a, b in box)] for box in placement.boxes(shape, size, rank)
        ]
        assert torch.cat(parts, dim).shape == placement.local_shape(shape, size, rank)
    shares = [placement.local_shape(shape, size, rank)[dim] for rank in range(size)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] in (0, segments * unit)


def test_replicated_holds_all() -> None:
    assert REPLICATED.boxes((2, 3), 4, 1) == (((0, 2), (0, 3)),)
    assert REPLICATED.local_shape((2, 3), 4) == (2, 3) and REPLICATED.fits((), 7)
    assert REPLICATED.boxes((), 2, 0) == ((),)
