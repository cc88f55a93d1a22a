"""A placement: its text form and its boxes, which tile the tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.values.placement import PARTIAL, REPLICATED, Placement, parse, shard
from synchromesh.values.transfer import intersection, volume


def test_text_forms() -> None:
    placements = [REPLICATED, Placement("r"), PARTIAL, shard(0), shard(2, 3)]
    assert [str(p) for p in placements] == ["R", "r", "P", "S(0)", "S(2, 3)"]
    assert [parse(str(p)) for p in placements] == placements


def test_segments_as_a_picture() -> None:
    """A fused q-k-v weight of 12 rows on two ranks: each holds half of every segment."""
    owner = ["?"] * 12
    for rank in range(2):
        for (start, stop), _ in shard(0, 3).boxes((12, 4), 2, rank):
            owner[start:stop] = [str(rank)] * (stop - start)
    assert " ".join(owner) == "0 0 1 1 0 0 1 1 0 0 1 1"


@given(st.integers(0, 1), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_boxes_tile_the_tensor(dim: int, segments: int, size: int, part: int) -> None:
    shape = (5, segments * size * part) if dim else (segments * size * part, 5)
    placement = shard(dim, segments)
    assert placement.divides(shape, size) and not placement.divides((1, 1), 2)
    boxes = [box for rank in range(size) for box in placement.boxes(shape, size, rank)]
    assert sum(map(volume, boxes)) == shape[0] * shape[1]
    assert not any(intersection(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(size):
        parts = [
            whole[tuple(slice(a, b) for a, b in box)] for box in placement.boxes(shape, size, rank)
        ]
        assert torch.cat(parts, dim).shape == placement.local_shape(shape, size)


def test_replicated_holds_all() -> None:
    assert REPLICATED.boxes((2, 3), 4, 1) == (((0, 2), (0, 3)),)
    assert REPLICATED.local_shape((2, 3), 4) == (2, 3) and REPLICATED.divides((), 7)
    assert REPLICATED.boxes((), 2, 0) == ((),)
