"""Cuts by work: against all cuts there are."""

from itertools import combinations

import numpy as np
import pytest

from synchromesh.planner.stages.cuts import cut


def sums(weights: list[float], firsts: tuple[int, ...]) -> list[float]:
    ends = [*firsts[1:], len(weights)]
    return [sum(weights[i:j]) for i, j in zip(firsts, ends, strict=True)]


def test_equal_work_is_cut_into_equal_stages() -> None:
    assert cut([1.0] * 12, 4) == (0, 3, 6, 9)
    assert cut([0.1] * 96, 4) == (0, 24, 48, 72)
    assert cut([5.0], 1) == (0,)


def test_the_largest_stage_decides_then_the_others_are_level() -> None:
    #                 a  b  c  d  e  f  g
    assert cut([9.0, 1, 1, 1, 1, 1, 1], 3) == (0, 1, 4)  # not (0, 1, 2), which is 9 | 1 | 5
    assert cut([1.0, 1, 1, 1, 9], 2) == (0, 4)


def test_no_other_cut_is_better() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        count = int(chance.integers(1, 8))
        stages = int(chance.integers(1, count + 1))
        weights = chance.integers(0, 6, count).astype(float).tolist()
        every = [(0, *rest) for rest in combinations(range(1, count), stages - 1)]
        found = sums(weights, cut(weights, stages))

        def order(firsts: tuple[int, ...], weights: list[float] = weights) -> tuple[float, float]:
            parts = sums(weights, firsts)
            return max(parts), sum(x * x for x in parts)

        assert len(found) == stages
        assert (max(found), sum(x * x for x in found)) == min(map(order, every))


@pytest.mark.parametrize("stages", [0, 3])
def test_stages_have_a_component_each(stages: int) -> None:
    with pytest.raises(ValueError, match="there are 2"):
        cut([1.0, 2.0], stages)
