"""The observer: costs of steps for the adapter, and batches of another size."""

from typing import Any

import pytest

from synchromesh.adapt.adapter import Adapter
from synchromesh.adapt.observer import NO_COST, Observer
from synchromesh.values.profile import Profile


@pytest.fixture
def observer() -> Observer:
    return Observer(Adapter(Profile(2)))


def test_another_size_must_be_that_of_most_batches(observer: Observer) -> None:
    sizes = [12] * 4 + [24] * (Observer.MOST - 1) + [5, 24]
    assert [observer.resized(n, 12) for n in sizes] == [False] * (len(sizes) - 1) + [True]


def test_sizes_that_take_turns_are_followed_ever_later(observer: Observer) -> None:
    """Each change takes twice as many batches as the one before."""
    planned, other, taken = 12, 24, []
    for _ in range(4):
        count = 1
        while not observer.resized(other, planned):
            count += 1
        taken.append(count)
        planned, other = other, planned
    assert taken == [Observer.MOST * 2**i for i in range(4)]


def test_the_adapter_sees_steps_that_every_rank_has_counted(
    observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []
    monkeypatch.setattr(observer.adapter, "record", lambda table, ranks: tables.append(table))
    observer.note(0.5, 0.2)
    assert observer.cost == (300_000, 200_000)
    observer.collect([(1, 2), NO_COST, (3, 0)], (0, 2))  # rank 1 is idle
    assert tables == [[(1, 2), (3, 0)]] and observer.cost == NO_COST
    observer.collect([(1, 2), NO_COST, (3, 0)], (0, 1))  # it has a part, but its step was a trial
    assert len(tables) == 1
    observer.note(0.1, 0.2)  # a wait may end after the clock was read
    assert observer.cost == (0, 100_000)
