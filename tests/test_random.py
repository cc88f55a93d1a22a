"""Random streams: equal where values are equal, different elsewhere, and nothing to save."""

from itertools import product

import torch

from synchromesh.engine.random import Streams


def _draw(streams: Streams, key: int = 0, sharded: bool = False) -> int:
    streams.seed(key, sharded)
    return int(torch.randint(2**62, ()))


def _place(step=0, micro=0, component=0, data=0, tensor=0, seed=0) -> Streams:
    streams = Streams(seed)
    streams.begin(step, micro)
    streams.at(component, data, tensor)
    return streams


def test_every_part_of_the_place_matters() -> None:
    places = [
        _draw(_place(*place), key)
        for *place, key in product((0, 1), (0, 1), (0, 1, 2), (0, 1), (0,), (0, 1, 2))
    ]
    assert len(set(places)) == len(places)
    assert _draw(_place(seed=1)) != _draw(_place(seed=2)) != _draw(_place(seed=-2))


def test_tensor_ranks_draw_the_same_unless_the_value_is_sharded() -> None:
    assert _draw(_place(tensor=0)) == _draw(_place(tensor=1))
    sharded = [_draw(_place(tensor=t), sharded=True) for t in range(3)]
    assert len({*sharded, _draw(_place())}) == 4


def test_recomputation_draws_the_same_bits() -> None:
    streams = _place(step=3)
    first = _draw(streams, 5)
    torch.rand(7)
    assert _draw(streams, 5) == first


def test_the_hash_is_stable() -> None:
    """A run that is resumed by a later version must draw what it drew."""
    streams = _place(1, 2, 3, 4, 5, 6)
    streams.seed(7, True)
    assert torch.initial_seed() == 1283974162606159270


def test_the_users_generator_is_left_alone() -> None:
    streams = Streams(0)
    torch.manual_seed(4)
    expected = torch.rand(3), torch.rand(3)
    torch.manual_seed(4)
    first = torch.rand(3)
    with streams.preserved():
        streams.seed(1, False)
        torch.rand(9)
    assert torch.equal(first, expected[0]) and torch.equal(torch.rand(3), expected[1])
