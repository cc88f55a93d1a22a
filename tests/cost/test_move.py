"""What a move costs: bytes that are lacking, by hand, and the rate of the links."""

import pytest

from synchromesh.cost.move import lacking, transfer_seconds
from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, shard
from synchromesh.values.profile import Curve, Pattern, Profile

TENSOR = Parameter("w", (8, 4), "float32")  # 128 bytes
WHOLE = Holding(TENSOR, Layout(4, 1), REPLICATED)
ROWS = Holding(TENSOR, Layout(1, 4), shard(0))
PAIRS = Holding(TENSOR, Layout(2, 2), shard(0))


def test_who_has_it_all_lacks_nothing() -> None:
    assert [lacking(WHOLE, ROWS, p, p) for p in range(4)] == [0] * 4
    assert lacking(WHOLE, PAIRS, 3, 0) == 0


def test_a_quarter_lacks_three() -> None:
    assert lacking(ROWS, WHOLE, 1, 1) == 96
    #  a quarter each      0 | 1 | 2 | 3      of which rank 2, of its half 0 1, has nothing
    #  a half each, twice  0 1 | 2 3 | 0 1 | 2 3
    assert [lacking(ROWS, PAIRS, p, p) for p in range(4)] == [32, 64, 64, 32]


def test_idle_ranks() -> None:
    assert lacking(ROWS, WHOLE, None, 0) == 128, "it was idle"
    assert lacking(ROWS, WHOLE, 0, None) == 0, "it will be"


def test_seconds_are_those_of_an_all_reduce() -> None:
    curve = Curve(((0.0, 0.0), (1000.0, 1.0)))
    known = Profile(4, network={("all_reduce", Pattern(4)): curve})
    # 1.5 bytes received for each of an all-reduce on four
    assert transfer_seconds(1500.0, 4, known) == pytest.approx(1.0)
    assert transfer_seconds(0.0, 4, known) == 0.0
    other = Profile(4, network={("all_gather", Pattern(2)): curve})
    assert transfer_seconds(1500.0, 4, other) == pytest.approx(1.0), "the slowest that is known"
    assert transfer_seconds(1.0, 4, Profile(4)) == 0.0
