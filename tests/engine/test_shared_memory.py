"""Parameters in one memory: all ranks see what one writes, and no file is left."""

import torch
from torch import Tensor

from synchromesh.engine.shared_memory import SharedMemory
from synchromesh.engine.world import World
from tests.ranks import run


def written() -> tuple[list[float], list[str]]:
    world = World.open("cpu")
    own: dict[str, Tensor] = {
        "odd": torch.full((3, 5), float(world.rank)), "one": torch.tensor(7.0 + world.rank),
        "none": torch.empty(0), "whole": torch.arange(4) + 10 * world.rank,
    }  # fmt: skip
    memory = SharedMemory(own, world.everyone)
    shapes = {n: (x.shape, x.dtype) for n, x in memory.tensors.items()}
    assert shapes == {n: (x.shape, x.dtype) for n, x in own.items()}
    memory.tensors["odd"][world.rank] = 100.0 + world.rank
    world.everyone.barrier()
    found = [float(memory.tensors[n].sum()) for n in ("odd", "one", "whole")]
    left = [p.name for p in SharedMemory.FOLDER.glob("synchromesh-*")]
    world.close()
    return found, left


def test_all_ranks_see_what_one_writes() -> None:
    rows = sum(5 * (100.0 + rank) for rank in range(3))
    for found, left in run(3, written):
        assert found == [rows, 7.0, 6.0]  # the first rank's values, but for what was written
        assert not left
