"""The ways of stages: sums over components, and what is left of gradient traffic."""

from dataclasses import replace

import numpy as np
import pytest

from synchromesh.planner.chain.problem import Option, Problem
from synchromesh.planner.chain.problem import evaluate as evaluate_chain
from synchromesh.planner.stages.problem import (
    StageFacts,
    group_sizes,
    micro_batch_numbers,
    stage_costs,
)
from synchromesh.values.profile import Overlap

COUNT = 5


def facts(seed: int, overlap: Overlap | None = None) -> StageFacts:
    chance = np.random.default_rng(seed)
    parts = [chance.uniform(0.0, 1.0, COUNT) for _ in range(6)]
    message = np.r_[0.0, chance.uniform(0.0, 0.1, COUNT - 1), 0.0]
    return StageFacts(*parts, message, overlap=overlap or Overlap())


def test_a_stage_of_one_micro_batch_is_the_chain() -> None:
    for seed in range(20):
        own = facts(seed)
        costs = stage_costs(lambda g, d, m, own=own: own, 1, (1,), (1,), COUNT)
        for i in range(COUNT):
            for j in range(i + 1, COUNT + 1):
                options = [
                    Option(own.forward[q], own.backward[q], own.gradient[q], own.update[q])
                    for q in range(i, j)
                ]
                alone = evaluate_chain(Problem(tuple((o,) for o in options)), [0] * (j - i))[0]
                seconds = costs.seconds[0, i, j, 0]
                assert seconds == pytest.approx(sum(o.forward + o.backward for o in options))
                assert seconds + costs.end[0, i, j, 0] == pytest.approx(alone)
                assert costs.kept[0, i, j, 0] == pytest.approx(own.kept[i:j].sum())


def test_messages_hide_behind_computation_as_far_as_it_lets_them() -> None:
    own = facts(0)
    computed, traffic = (own.forward + own.backward)[1:3].sum(), own.message[1] + own.message[3]

    def busy(overlap: Overlap) -> float:
        costs = stage_costs(lambda g, d, m: facts(0, overlap), 1, (1,), (1,), COUNT)
        return float(costs.seconds[0, 1, 3, 0])

    assert busy(Overlap()) == pytest.approx(max(computed, traffic))
    assert busy(Overlap(compute=0.1)) == pytest.approx(computed + 0.9 * traffic)
    assert busy(Overlap(network=0.05)) == pytest.approx(max(computed, 20 * traffic))


def test_every_micro_batch_begins() -> None:
    own = facts(0)
    plain = stage_costs(lambda g, d, m: own, 1, (1,), (1,), COUNT)
    late = stage_costs(lambda g, d, m: replace(own, begin=0.5), 1, (1,), (1,), COUNT)
    assert late.seconds[0, 1, 4, 0] - plain.seconds[0, 1, 4, 0] == pytest.approx(0.5)


def test_a_degree_that_does_not_divide_the_group_is_not_offered() -> None:
    costs = stage_costs(lambda g, d, m: None if g == 4 else facts(0), 1, (2, 3, 4), (1, 2), COUNT)
    offered = np.isfinite(costs.seconds[:, 0, 1])
    assert offered.tolist() == [[True, True, False], [True, False, False]]


def test_sizes_of_groups() -> None:
    assert group_sizes(5) == (1, 2, 3, 4, 5)
    assert set(group_sizes(64)) >= {1, 2, 4, 8, 16, 32, 48, 56, 60, 62, 63, 64}
    assert {g % 8 for g in group_sizes(1024)} == {0}
    assert group_sizes(1009) == (1009,)  # a prime number of devices, beyond what has units


def test_micro_batches_have_equally_many_rows() -> None:
    assert micro_batch_numbers(96) == (1, 2, 4, 8, 16, 32)
    assert micro_batch_numbers(100) == (1, 2, 4, 5, 10, 20, 25, 50, 100)
    assert micro_batch_numbers(7) == (1, 7)
