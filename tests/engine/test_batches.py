"""Batches: rows of nested tensors, ranges of data indices, micro-batches."""

import pytest
import torch

from synchromesh.engine import batches
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.world import World
from synchromesh.trace.capture.batch import take
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from tests.ranks import run

PLAN = Plan.parse("data")


def nested(rows: int) -> dict[str, object]:
    x = torch.arange(rows * 2.0).view(rows, 2)
    return {"in": (x, x[:, 0] > 2), "scale": torch.tensor(2.0), "name": "n", "list": [x.long(), 3]}


def test_rows_are_taken_of_what_has_rows() -> None:
    batch = nested(5)
    assert batches.row_count(batch) == 5
    part = take(batch, 1, 3)
    assert batches.row_count(part) == 2
    assert torch.equal(part["in"][0], batch["in"][0][1:3])  # type: ignore[index]
    assert part["scale"] is batch["scale"] and part["name"] == "n" and part["list"][1] == 3


def test_batches_without_one_number_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 3\]"):
        batches.row_count((torch.zeros(2), torch.zeros(3)))
    with pytest.raises(ValueError, match="at least one tensor with rows"):
        batches.row_count({"a": torch.tensor(1.0), "b": 2})


def test_one_row_of_zeros_has_the_shape_of_the_batch() -> None:
    batch = nested(3)
    assert batches.one_row(batch)["in"][0] is batch["in"][0]  # type: ignore[index]
    row = batches.one_row(take(batch, 0, 0))
    assert batches.row_count(row) == 1
    assert not row["in"][0].any()  # type: ignore[index]


def stand_ins() -> list[int]:
    world = World.open("cpu")
    counts = (0, 2, 0, 1)
    mine = torch.arange(counts[world.rank]) + 10 * world.rank
    rows = GlobalRows(counts, PLAN)
    found = batches.with_stand_in(
        {"x": mine, "y": [torch.tensor(3.0)]}, rows, Layout(4, 1), world.rank, world.everyone
    )
    world.close()
    return found["x"].tolist()  # type: ignore[no-any-return]


def test_a_rank_without_rows_is_lent_the_first_of_the_first_that_has_some() -> None:
    assert run(4, stand_ins) == [[10], [10, 11], [10], [30]]


def test_micro_batches_cut_each_ranks_rows() -> None:
    rows = GlobalRows((3, 2, 2, 0), PLAN)
    parts = rows.micro(2)
    assert [p.counts for p in parts] == [(2, 1, 1, 0), (1, 1, 1, 0)]
    assert sum(p.total for p in parts) == rows.total == 7


def test_blocks_of_a_coarser_layout_are_unions() -> None:
    rows = GlobalRows((3, 2, 2, 1), PLAN)
    assert rows.ranges(4) == ((0, 3), (3, 5), (5, 7), (7, 8))
    assert rows.ranges(2) == ((0, 5), (5, 8))
    assert rows.ranges(1) == ((0, 8),)
    # degrees that do not nest go by the plan
    assert GlobalRows((2, 2, 2), PLAN).ranges(2) == PLAN.row_ranges(6, 2)


def test_checksums_tell_batches_apart() -> None:
    assert batches.checksum(nested(4)) == batches.checksum(nested(4))
    assert batches.checksum(nested(4)) != batches.checksum(nested(5))
    conjugate = torch.ones(4, dtype=torch.complex64).mul(1j).conj()
    assert batches.checksum(conjugate) == batches.checksum(conjugate.resolve_conj())
    assert batches.fingerprint(("a", 1)) == batches.fingerprint(("a", 1)) < 2**63
