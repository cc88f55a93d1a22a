"""How far a curve of a collective goes: what reaches far enough is not measured again."""

import pytest

from synchromesh.profiling import collectives as module
from synchromesh.profiling.collectives import TUNING, reaches
from synchromesh.values.profile import Curve, Pattern

SIZES = TUNING.sizes


@pytest.mark.parametrize(
    ("size", "seconds", "payload", "enough"),
    [
        (SIZES[2], 0.01, SIZES[2], True),
        (SIZES[2], 0.01, SIZES[2] + 1, False),
        (SIZES[-1], 0.01, 100 * SIZES[-1], True),  # the largest there is
        (SIZES[2], 1.1 * TUNING.most_seconds, SIZES[4], True),  # it was ended there
        (
            SIZES[2],
            1.1 * TUNING.most_seconds / 1.5,
            SIZES[4],
            True,
        ),  # and scaled since
    ],
)
def test_reach(size: int, seconds: float, payload: int, enough: bool) -> None:
    assert reaches(Curve(((1.0, 1e-4), (float(size), seconds))), payload) is enough


def test_a_pause_while_few_bytes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than more bytes do is no latency: it raises no other point."""
    taken = {1 << 10: 0.008, 1 << 14: 0.001, 1 << 17: 0.005}
    monkeypatch.setattr(module, "_seconds", lambda *args: taken[args[-1]])
    points = module._curve(None, [None], "send", Pattern(2), 1 << 17)  # type: ignore[arg-type, list-item]
    assert Curve.of(points).points == ((1 << 10, 0.001), (1 << 14, 0.001), (1 << 17, 0.005))
