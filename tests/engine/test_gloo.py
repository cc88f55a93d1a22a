"""Groups on the default group's device: one thread for all of them, and times out of their own."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from synchromesh.engine.world import World
from tests.ranks import run


def loops() -> int:
    """Threads of gloo's in this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("gloo_tcp") for name in names)


def threads_of_groups() -> tuple[int, list[float]]:
    world = World.open("cpu")
    members = [(0, 1, 2), (0, 1), (2, 1), (2, 0), (1, 2, 0)]
    sums = list[float]()
    for ranks in members:
        if (group := world.group(ranks)).index >= 0:
            group.all_reduce(x := torch.tensor(float(world.rank)))
            sums.append(float(x) - sum(ranks))
    found = loops()
    world.close()
    assert loops() == found == 1, "the default group's stays"
    return found, sums


@pytest.mark.skipif(sys.platform != "linux", reason="threads have names in /proc on Linux alone")
def test_all_groups_of_a_process_share_one_thread() -> None:
    for threads, sums in run(3, threads_of_groups):
        assert threads == 1 and not any(sums) and len(sums) >= 4


def silent_member() -> str:
    """What a rank is told whose partner does not call."""
    world = World.open("cpu", timedelta(seconds=1))
    group, told = world.group((0, 1)), ""
    if world.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.zeros(1))
        told = str(caught.value)
    dist.barrier()
    world.close()
    return told


def test_a_group_keeps_the_time_out_of_its_world() -> None:
    assert "imed out" in run(2, silent_member)[0]
