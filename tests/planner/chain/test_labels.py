"""Which labels stay, against a comparison of all pairs."""

import numpy as np
import pytest

from synchromesh.planner.chain.labels import undominated


def expected(state, x, y, z, limited):  # type: ignore[no-untyped-def]
    """The first of every set of equals, unless another label of its state is below it."""

    def below(i: int, j: int) -> bool:
        if state[i] != state[j] or x[i] > x[j] or y[i] > y[j] or (limited and z[i] > z[j]):
            return False
        equal = x[i] == x[j] and y[i] == y[j] and (not limited or z[i] == z[j])
        return not equal or (z[i], i) < (z[j], j)

    return [j for j in range(len(x)) if not any(below(i, j) for i in range(len(x)) if i != j)]


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_pair_compared(seed: int, limited: bool) -> None:
    chance = np.random.default_rng(seed)
    n, values = int(chance.integers(1, 150)), int(chance.integers(2, 40))
    state = chance.integers(0, 4, n)
    x, y, z = (chance.integers(0, values, n).astype(float) for _ in range(3))
    assert undominated(state, x, y, z, limited).tolist() == expected(state, x, y, z, limited)


def test_no_labels() -> None:
    none = np.zeros(0)
    for limited in (False, True):
        assert len(undominated(none.astype(int), none, none, none, limited)) == 0
