"""Interleaved 1F1B: the formula, unequal devices and memory."""

from dataclasses import replace

import pytest

from synchromesh.planner.stages.chunks import interleaved
from synchromesh.planner.stages.search import search
from synchromesh.values.schedule import pipeline
from tests.planner.stages.test_search import chain


def test_its_fill_is_half_as_long_where_another_number_of_groups_is_best() -> None:
    sizes = (1, 2)
    problem = chain([12.0] * 8, 4, sizes=sizes, micro_batches=(4, 8))
    found = interleaved(problem)
    assert found is not None
    t = 8 * 12.0 / 4 / found.micro_batches  # of a group that has a quarter of the layers
    assert [(s.first, s.devices) for s in found.stages] == [(i, 1) for i in range(8)]
    assert (found.micro_batches, found.chunks) == (8, 2)
    assert found.seconds == pytest.approx(8 * t + 3 * t / 2)
    plain = search(problem)
    assert plain is not None
    assert found.seconds == pytest.approx(plain.seconds - 3 * t / 2)


def test_micro_batches_are_a_multiple_of_the_groups_and_groups_have_two_stages() -> None:
    assert interleaved(chain([12.0] * 8, 4, sizes=(1,), micro_batches=(1, 2))) is None
    assert interleaved(chain([12.0] * 3, 2, micro_batches=(4,))) is None
    assert interleaved(chain([12.0] * 8, 1, micro_batches=(4,))) is None


def test_the_slowest_group_sets_the_pace() -> None:
    equal = interleaved(chain([12.0] * 8, 2, sizes=(1,)))
    slow = interleaved(chain([12.0] * 8, 2, sizes=(1,), slowdowns=(1.0, 2.0)))
    assert equal and slow
    assert slow.seconds == pytest.approx(2 * equal.seconds)


def test_a_group_holds_what_its_schedule_has_in_flight() -> None:
    problem = chain([12.0] * 8, 2, sizes=(1,), micro_batches=(8,))
    actions = pipeline("interleaved", (0, 1, 0, 1), 8)
    most = [0, 0]
    for group, its in enumerate(actions.groups):
        held = 0
        for action in its:
            held += 1 if action.kind == "F" else -1
            most[group] = max(most[group], held)
    assert most == [5, 3]
    bytes_ = 4 + most[0] * 2 / 8  # four layers, and of each in flight the two of a stage
    assert interleaved(replace(problem, limits=(bytes_, bytes_))) is not None
    assert interleaved(replace(problem, limits=(bytes_ - 0.01, bytes_))) is None
