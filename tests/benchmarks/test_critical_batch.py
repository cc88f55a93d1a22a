"""How the sweep of batch sizes counts epochs, on made-up curves."""

from itertools import islice
from math import inf, log2
from typing import Any

import pytest
import torch

from benchmarks.critical_batch import SWEEPS, batches, best_factor, crossing, noise, result
from synchromesh.engine.noise_averages import NoiseScale


def test_a_target_is_reached_between_two_evaluations() -> None:
    curve = [(rows, rows / 1_000) for rows in range(100, 1_000, 100)]
    assert crossing(curve, 0.55, window=3) == pytest.approx(550)
    assert crossing(curve, 0.8, window=3) == pytest.approx(800)
    assert crossing(curve, 0.85, window=3) == inf  # the last average is that around 800 rows


def test_one_lucky_evaluation_reaches_nothing() -> None:
    curve = [(rows, 0.5) for rows in range(10)] + [(10, 0.9)] + [(11 + n, 0.5) for n in range(9)]
    assert crossing(curve, 0.8, window=1) < inf
    assert crossing(curve, 0.8, window=3) == inf


@pytest.mark.parametrize("best", [0.125, 0.5, 1.0, 2.0, 16.0])
def test_the_best_rate_is_found_and_no_run_is_longer_than_needed(best: float) -> None:
    asked = dict[float, float]()

    def epochs(factor: float, most: float) -> float:
        asked[factor] = most
        found = 3.0 + abs(log2(factor / best))
        return found if found < most else inf

    tried = best_factor(epochs)
    assert min(tried, key=lambda f: tried[f]) == best
    assert asked[1.0] == inf and all(asked[f] <= tried[1.0] for f in asked if f != 1.0)
    assert {best / 2, best * 2} <= asked.keys()  # its neighbours are worse, and not unknown


def test_batches_are_full_and_an_epoch_has_every_row_once() -> None:
    found = torch.cat([*islice(batches(10, 4, seed=3), 5)])
    assert len(found) == 20
    assert sorted(found[:10].tolist()) == sorted(found[10:].tolist()) == [*range(10)]
    assert found.tolist() == torch.cat([*islice(batches(10, 4, seed=3), 5)]).tolist()
    assert found.tolist() != torch.cat([*islice(batches(10, 4, seed=4), 5)]).tolist()


def test_the_average_is_of_the_steps_behind_the_start() -> None:
    start = NoiseScale(squared_gradient=4.0, trace=40.0, steps=10)
    end = NoiseScale(squared_gradient=3.0, trace=60.0, steps=20)  # then 10 with 2.0 and 80.0
    assert noise([start]) == 10.0
    assert noise([end], [start]) == 40.0
    assert noise([NoiseScale(squared_gradient=-1.0, trace=60.0, steps=20)]) is None


def row(batch: int, *epochs: float | None) -> dict[str, Any]:
    return {"batch": batch, "epochs": [*epochs], "start": 5.0, "average": 50.0}


def test_a_sweep_on_the_curve_gives_its_critical_batch() -> None:
    rows = [row(b, 1.9 * (1 + b / 100), 2.1 * (1 + b / 100)) for b in SWEEPS["mnist"].batches]
    found = result("mnist", 64, rows)
    assert found["fit"]["critical_batch"] == pytest.approx(100)
    assert found["fit"]["minimum_epochs"] == pytest.approx(2)
    assert found["passed"] and found["noise_scale"] == {"start": 5.0, "average": 50.0}


def test_a_batch_that_misses_the_target_is_no_point_and_no_success() -> None:
    rows = [row(b, 2 * (1 + b / 100)) for b in SWEEPS["mnist"].batches[:-1]]
    found = result("mnist", 64, [*rows, row(SWEEPS["mnist"].batches[-1], None)])
    assert len(found["fit"]["points"]) == len(rows) and not found["passed"]
