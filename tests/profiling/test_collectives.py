"""How far a curve of a collective goes: what reaches far enough is not measured again."""

import pytest

from synchromesh.profiling.collectives import SIZES, TUNING, reaches
from synchromesh.values.profile import Curve


@pytest.mark.parametrize(
    ("size", "seconds", "payload", "enough"),
    [
        (SIZES[2], 0.01, SIZES[2], True),
        (SIZES[2], 0.01, SIZES[2] + 1, False),
        (SIZES[-1], 0.01, 100 * SIZES[-1], True),  # the largest there is
        (SIZES[2], 1.1 * TUNING.most_seconds, SIZES[4], True),  # it was ended there
        (SIZES[2], 1.1 * TUNING.most_seconds / 1.5, SIZES[4], True),  # and scaled since
    ],
)
def test_reach(size: int, seconds: float, payload: int, enough: bool) -> None:
    assert reaches(Curve(((1.0, 1e-4), (float(size), seconds))), payload) is enough
