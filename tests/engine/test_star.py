"""The star: what a ring gives, on groups of any order and size."""

import pytest
import torch

from synchromesh.engine import star
from synchromesh.engine.groups import World
from tests.ranks import run


def same_as_a_ring(ranks: tuple[int, ...]) -> bool:
    world = World.open("cpu")
    group = world.group(ranks)
    if world.rank not in ranks:
        world.close()
        return True
    own = torch.tensor([[world.rank, 7 * world.rank, -(2**62)]])
    found, ring = star.all_gather(group, own), group.all_gather(own, counted=False)
    told = torch.full((3,), float(world.rank), dtype=torch.float64)
    if (work := star.start_broadcast(group, told, ranks[-1])) is not None:
        work.wait()
    same = torch.equal(found, ring) and told.tolist() == [ranks[-1]] * 3
    world.close()
    return same and found.dtype is own.dtype


@pytest.mark.parametrize("ranks", [(0,), (1, 0), (0, 1, 2, 3), (3, 1, 2)])
def test_it_gives_what_a_ring_gives(ranks: tuple[int, ...]) -> None:
    assert run(4, same_as_a_ring, ranks) == [True] * 4
