"""The inequality of hybrids at scale, on drawn seconds of steps."""

import json
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.hybrid_at_scale import Steps, Times, page, plain, said, studied


@pytest.mark.parametrize("seed", range(20))
def test_with_its_own_efficiency_the_inequality_names_the_winner(seed: int) -> None:
    chance = random.Random(seed)
    numbers = [1 << k for k in range(7)]
    times = Times(
        32, {n: chance.uniform(1, 3) for n in numbers},
        {m: {n: chance.uniform(0.3, 2) for n in numbers if n * m <= 64} for m in (2, 4)},
    )  # fmt: skip
    for critical in (10.0, 300.0, 1e5):
        for m, its in times.hybrid.items():
            for n in its:
                sooner = times.hybrid_speedup(m, n, critical) > times.speedup(m * n, critical)
                assert times.wins(m, n, critical, own=True) == sooner


def test_the_speedups_by_hand() -> None:
    """32 rows a worker, a critical batch of 32: E_N = 1 + N. Two devices as two workers take 1.5
    times as many epochs as one, of half as many steps; as one hybrid worker as many."""
    times = Times(32, {1: 1.0, 2: 1.25}, {2: {1: 0.8}})
    assert times.speedup(2, 32.0) == pytest.approx(2 / 1.25 / 1.5)
    assert times.hybrid_speedup(2, 1, 32.0) == pytest.approx(1 / 0.8)
    assert times.gain(32.0) == pytest.approx(1.25 / (2 / 1.25 / 1.5) - 1.0)
    assert times.crossing(32.0) == 2
    assert not times.wins(2, 1, 1e9, own=True)  # a batch costs nothing: 1.6 times as quick


def study(times: Times) -> dict[str, Any]:
    known = cast(Steps, SimpleNamespace(times=lambda network: times))
    return studied(known, "Net", "ethernet25", 0.1)


def test_the_answer_comes_first_on_the_page() -> None:
    numbers = [1 << k for k in range(7)]
    hybrid = {2: {n: 0.6137 + 0.0113 * n for n in numbers[:-1]}}
    found = study(Times(32, {n: 1 + 0.02 * n for n in numbers}, hybrid, {2: "tensor"}))
    assert found["identity_fails"] == 0 and found["cases"] == len(hybrid[2]) * len(found["gains"])
    assert "10.0% follows from these steps for critical batches up to" in said(found)
    shown = page([found])
    assert shown.index("A hybrid reaches the target sooner") < shown.index("Nothing was run")
    assert json.loads(json.dumps(plain(found)))["times"]["rows"] == 32


def test_without_a_worker_that_fits_no_hybrid_wins() -> None:
    found = study(Times(32, {1: 1.0, 2: 1.1}, {}))
    assert found["wins"] == 0 and "no hybrid reaches the target sooner" in said(found)
    assert "No hybrid fits." in page([found])
