"""The inequality of hybrids at scale, on drawn seconds of steps."""

import random

import pytest

from benchmarks.hybrid_at_scale import Times


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
