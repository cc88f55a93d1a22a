"""A cursor: the order of samples, and its form in a checkpoint."""

from typing import Any

import pytest
import torch

from synchromesh.data.cursor import Cursor, StreamPlace


def test_the_order_follows_from_seed_and_epoch() -> None:
    orders = {tuple(Cursor(s, e).order(20).tolist()) for s in (0, 1) for e in (0, 1)}
    assert len(orders) == 4
    before = torch.get_rng_state()
    assert torch.equal(Cursor(5, 2).order(20), Cursor(5, 2, 8).order(20))
    assert torch.equal(torch.get_rng_state(), before), "the user's generator is left alone"
    assert Cursor(5, 2).order(4, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_order_of_a_seed_is_kept_from_version_to_version() -> None:
    """Checkpoints have the position, not the order."""
    assert Cursor(seed=3).order(10).tolist() == [6, 4, 0, 3, 7, 2, 1, 5, 8, 9]


def test_places_survive_a_checkpoint() -> None:
    place = StreamPlace(((8, 7), (4, 4)), 1, (({"dict": {"n": 8}}, None), (None, None)))
    for cursor in (Cursor(1, 2, 3), Cursor(1, 2, 23, place), Cursor(1, samples=9)):
        assert Cursor.from_dict(cursor.to_dict()) == cursor
    assert StreamPlace.start(2, 3).shape == (2, 3)


PLACE: dict[str, Any] = {"read": [[1, 2]], "worker": 0, "states": [[None, None]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "cursor: epoch: should"),
        ({"position": None}, "cursor: position: should be a whole number"),
        ({"stream": {**PLACE, "worker": 1}}, "cursor: stream: worker: should be from 0 to 0"),
        ({"stream": {**PLACE, "read": [[1, -2]]}}, "cursor: stream: read: should be from 0"),
        ({"stream": {**PLACE, "read": []}}, "should be tables of one shape"),
        ({"stream": {**PLACE, "states": [[None]]}}, "should be tables of one shape"),
        ({"stream": {"read": [[0]]}}, "cursor: stream: worker, states is missing"),
    ],
)
def test_a_damaged_place(change: dict[str, Any], message: str) -> None:
    good = {"seed": 1, "epoch": 0, "position": 0}
    with pytest.raises(ValueError, match=message):
        Cursor.from_dict({**good, **change})
    with pytest.raises(ValueError, match="cursor: epoch, position is missing"):
        Cursor.from_dict({"seed": 1})
