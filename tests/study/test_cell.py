"""The grid of a study: every combination once, in groups that fit the machine."""

from dataclasses import replace

import pytest

from synchromesh.results.study import StudySettings
from synchromesh.study.cell import StudyCell, grid, groups, require_distinct

ASKED = StudySettings(("single", "data", "ddp"), (1, 2, 4), (64, 128), (0, 1), steps=30)


def test_every_combination_is_there_once() -> None:
    cells = grid("a/b", ASKED)
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 2 * 2)
    assert [c.key for c in cells[:3]] == [
        "a-b-single-1x64-seed0",
        "a-b-data-2x64-seed0",
        "a-b-ddp-2x64-seed0",
    ]
    assert all(c.devices == 1 for c in cells if c.strategy == "single")
    assert str(cells[1]) == "a/b: data on 2 devices, batch 64, seed 0"


def test_under_weak_scaling_a_batch_is_that_of_one_device() -> None:
    cells = grid("a/b", replace(ASKED, scaling="weak", batch_sizes=(64,), seeds=(0,)))
    assert {(c.devices, c.batch) for c in cells} == {(1, 64), (2, 128), (4, 256)}
    assert groups(cells, replace(ASKED, scaling="weak"), 99) == [cells]


def test_what_is_compared_stays_together_as_far_as_it_fits() -> None:
    cells = grid("a/b", ASKED)
    assert [len(g) for g in groups(cells, ASKED, 99)] == [5] * 4
    fit = groups(cells, ASKED, 8)
    assert [[(c.strategy, c.devices) for c in g] for g in fit[:2]] == [
        [("single", 1), ("data", 2), ("ddp", 2)],
        [("data", 4), ("ddp", 4)],
    ]
    assert [c for g in fit for c in g] == [c for g in groups(cells, ASKED, 99) for c in g]
    alone = groups(cells, ASKED, 3)  # even one that does not fit is run
    assert [c.key for c in alone[3]] == ["a-b-data-4x64-seed0"] and len(alone) == 5 * 4


def test_plans_have_names_that_files_can_hold() -> None:
    assert StudyCell("m", "data; c*=tensor", 2, 8, 0).key == "m-data-c-=tensor-2x8-seed0"
    same = replace(ASKED, strategies=("data; a=tensor", "data;a=tensor"))
    with pytest.raises(ValueError, match="would share the name a-b-data-a=tensor-2x64-seed0"):
        grid("a/b", same)
    two = [StudyCell("a/b", "data", 2, 8, 0), StudyCell("a-b", "data", 2, 8, 0)]
    with pytest.raises(ValueError, match="'data' of a/b and 'data' of a-b would share the name"):
        require_distinct(two)
