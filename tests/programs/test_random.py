"""Random streams: equal where values are equal, different elsewhere, and nothing to save."""

from itertools import product

import torch

from synchromesh.programs.random import RandomStreams


def _draw(streams: RandomStreams, key: int = 0, sharded: bool = False, rows: bool = True) -> int:
    streams.seed(key, sharded, rows)
    return int(torch.randint(2**62, ()))


def _place(step=0, micro=0, component=0, data=0, tensor=0, seed=0, piece=0) -> RandomStreams:
    streams = RandomStreams(seed)
    streams.begin(step, micro, piece)
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


def test_a_draw_for_all_rows_is_one_on_all_ranks_and_pieces() -> None:
    known = _draw(_place(), rows=False)
    same = [_place(data=1), _place(data=2, piece=3), _place(piece=1).copy()]
    same[2].begin(0, 0, 2)
    same[2].at(0, 4, 1)
    assert all(_draw(s, rows=False) == known for s in same)
    others = [_place(step=1), _place(micro=4), _place(component=1), _place(seed=1)]
    drawn = [_draw(s, rows=False) for s in others]
    drawn += [_draw(_place(), 1, rows=False), _draw(_place(tensor=1), sharded=True, rows=False)]
    drawn += [_draw(_place(data=d, piece=p)) for d in range(3) for p in range(3)]
    assert len({known, *drawn}) == 1 + len(drawn)


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
    streams = RandomStreams(0)
    torch.manual_seed(4)
    expected = torch.rand(3), torch.rand(3)
    torch.manual_seed(4)
    first = torch.rand(3)
    with streams.preserved():
        streams.seed(1, False)
        torch.rand(9)
    assert torch.equal(first, expected[0]) and torch.equal(torch.rand(3), expected[1])
