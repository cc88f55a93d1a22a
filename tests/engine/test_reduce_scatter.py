"""Ways to carry out a reduce-scatter: each gives the sum, rings go on meanwhile and in order."""

import pytest
import torch

from synchromesh.engine import reduce_scatter
from synchromesh.engine.reduce_scatter import PLAIN, WAYS, Ring, begin, quickest
from synchromesh.engine.world import World
from tests.ranks import run

RANKS = (0, 1, 2)


def numbers(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6, dtype=dtype).view(3, 2) + 1) * (rank + 1)


def each_way(way: str) -> list[list[list[float]]]:
    """Of float32, int16 and a lazy negative."""
    world = World.open("cpu")
    world.add_ring(RANKS)
    lazy = torch.complex(torch.zeros(3, 2), -numbers(world.rank)).conj().imag
    given = [numbers(world.rank), numbers(world.rank, torch.int16), lazy]
    found = [begin(world.everyone, x, way)() for x in given]
    assert [x.dtype for x in found] == [x.dtype for x in given]
    world.close()
    return [x.tolist() for x in found]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_sum_of_a_ranks_part(way: str) -> None:
    total = sum(numbers(rank) for rank in RANKS)
    assert run(3, each_way, way) == [[total[rank].tolist()] * 3 for rank in RANKS]


def rings_at_once() -> list[list[float]]:
    """Two under way, the second of which is waited for first."""
    world = World.open("cpu")
    world.add_ring(RANKS)
    first = begin(world.everyone, numbers(world.rank), "ring")
    second = begin(world.everyone, 10 * numbers(world.rank), "ring")
    assert isinstance(first, Ring) and isinstance(second, Ring)
    assert world.everyone.rings == [first, second]
    found = [second().tolist(), first().tolist()]
    assert first.over and second.over and not world.everyone.rings
    world.close()
    return found


def test_rings_of_a_group_follow_each_other() -> None:
    total = sum(numbers(rank) for rank in RANKS)
    wanted = [[(10 * total[rank]).tolist(), total[rank].tolist()] for rank in RANKS]
    assert run(3, rings_at_once) == wanted


def chosen(ring: bool) -> str:
    world = World.open("cpu")
    if ring:
        world.add_ring(RANKS)
    tried: list[str] = []
    original = reduce_scatter.begin

    def noted(group: object, x: torch.Tensor, way: str) -> object:
        tried.append(way)
        return original(group, x, way)  # type: ignore[arg-type]

    reduce_scatter.begin = noted  # type: ignore[assignment]
    way = quickest(world.everyone, 4096)
    reduce_scatter.begin = original
    assert set(tried) == set(WAYS if ring else PLAIN)
    world.close()
    return way


@pytest.mark.parametrize("ring", [True, False])
def test_ranks_agree_on_one_of_the_ways_that_there_are(ring: bool) -> None:
    (way,) = set(run(3, chosen, ring))
    assert way in (WAYS if ring else PLAIN)
