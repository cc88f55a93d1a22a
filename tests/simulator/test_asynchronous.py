"""Workers that go on without each other: pictures with exact numbers, and laws."""

from collections import Counter

import numpy as np
import pytest

from synchromesh.simulator.asynchronous import NO_MESSAGES, MessageSeconds, WorkersWalk, walk
from synchromesh.values.synchronisation import Synchronisation


def walked(
    word: str, seconds: list[float], steps: int = 40, messages: MessageSeconds = NO_MESSAGES
) -> WorkersWalk:
    """seconds: of a step of each worker."""
    computing = np.repeat([seconds], steps, axis=0).astype(float)
    return walk(Synchronisation.parse(word), computing, messages)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("word", ["downpour:1", "shat:2", "ssp:2,stale=1"])
def test_equal_workers_are_as_stale_as_there_are_others(word: str, count: int) -> None:
    """All fetch behind the first of their updates, and so on: but the first gradients are of
    what all have begun with, to which 0, 1, ... updates of others came before."""
    made = walked(word, [1.0] * count)
    assert made.seconds == 40 and made.apart == (40, 40 * count)
    assert made.waiting_shares == (0,) * count
    servers = int(word.partition(":")[2][0])
    if not word.startswith("ssp"):  # which has parameters of its own until they are too old
        first = {age: servers for age in range(count - 1)}
        assert made.ages == {**first, count - 1: servers * (40 * count - count + 1)}
    assert made.lead <= 1


def test_a_server_s_link_has_one_message_after_another() -> None:
    """Three others push to the server, whose own worker has no message:

    0 | c c c c ...
    1 | c p f c p f            computes, pushes, fetches
    2 | c . p f c p f          waits once, from then on the link is free when it comes
    3 | c . . p f c p f"""
    made = walked("downpour:1", [1.0] * 4, 10, MessageSeconds(1.0, 1.0))
    assert made.seconds == 10 * 3 + 2
    assert made.waiting_shares[0] == pytest.approx(1 - 10 / 32)
    computing = np.ones((10, 4))
    apart = walk(Synchronisation.parse("downpour:1"), computing, MessageSeconds(1.0, 1.0), True)
    assert apart.seconds == 10 * 4 + 2, "a server of its own has all four"
    crowded = walked("downpour:1", [0.0] * 8, 10, MessageSeconds(1.0, 0.5))
    assert 10 * 7 <= crowded.seconds < 10 * 7 + 1, "what comes in is all that it waits for"
    spread = walked("downpour:8", [0.0] * 8, 10, MessageSeconds(1.0 / 8, 0.5 / 8))
    assert spread.seconds < crowded.seconds / 3, "servers on all workers have a link each"
    rare = walked("downpour:1,push=5,fetch=5", [0.0] * 8, 10, MessageSeconds(1.0, 0.5))
    assert rare.seconds < crowded.seconds / 4


@pytest.mark.parametrize("stale", [1, 3])
@pytest.mark.parametrize("servers", [1, 4])
def test_nobody_is_further_ahead_than_its_bound(stale: int, servers: int) -> None:
    draw = np.random.default_rng(stale + servers)
    computing = draw.exponential(1.0, (60, 4)) * [1.0, 1.0, 2.0, 5.0]
    messages = MessageSeconds(0.3, 0.2)
    sync = Synchronisation.parse(f"ssp:{servers},stale={stale}")
    bound = walk(sync, computing, messages)
    free = walk(Synchronisation.parse(f"downpour:{servers}"), computing, messages)
    assert bound.lead <= stale < free.lead
    assert bound.seconds >= computing[:, 3].sum() and free.seconds >= computing[:, 3].sum()
    assert free.apart[0] < bound.apart[0], "the quick ones wait for the slow one"
    assert sum(free.ages.values()) == 60 * 4 * servers


def test_one_that_is_slow_all_the_time_is_waited_for_at_the_end() -> None:
    made = walked("downpour:1", [1.0, 1.0, 1.0, 4.0])
    assert made.seconds == 160 and made.apart == (40, 3 * 40 + 10)
    assert made.gain == pytest.approx(130 / 40 / (160 / 160))
    assert made.waiting_shares == (0.75, 0.75, 0.75, 0.0)
    alone = walked("hogwild", [1.0, 2.0])
    assert alone.to_dict()["staleness"] is None and alone.seconds == 80


@pytest.mark.parametrize(
    ("word", "age", "lead"), [("downpour:1", 2.75, 7), ("ssp:1,stale=3", 5.41, 3)]
)
def test_ages_are_those_of_a_run(word: str, age: float, lead: int) -> None:
    """`train digits/cnn --nproc 4 --steps 100` on two busy cores: four epochs of 25 steps."""
    draw, ages, most = np.random.default_rng(0), Counter[int](), 0
    for _ in range(4):
        computing = 0.07 * np.maximum(1 + 0.3 * draw.standard_normal((25, 4)), 0.05)
        made = walk(Synchronisation.parse(word), computing, MessageSeconds(5e-4, 5e-4))
        ages.update(made.ages)
        most = max(most, made.lead)
    assert sum(a * n for a, n in ages.items()) / ages.total() == pytest.approx(age, rel=0.05)
    assert ages.total() == 400 and most <= lead
