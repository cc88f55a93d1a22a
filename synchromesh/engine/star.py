"""Small messages between all ranks by way of one of them, where gloo's rings take a round a rank.

    gather     ranks 1, 2, 3 -> 0        then    broadcast     0 -> 1, 2 -> 3

Of 96 bytes on two cores, milliseconds until they are there and of processor on the first rank:

    ranks                      2            4            8
    all-gather in a ring    0.51 0.40    1.99 1.06    6.92 2.12
    gather and broadcast    0.73 0.57    0.87 0.59    1.38 0.75
    all-reduce in a ring    0.55 0.42    2.43 1.02    4.44 1.17
    broadcast               0.21 0.17    0.29 0.26    0.33 0.22
"""

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

RING = 2  # ranks up to which a ring is as quick; measured, above


class Reachable(Protocol):
    """What is asked of a group (engine/groups.py)."""

    ranks: tuple[int, ...]
    index: int
    size: int
    handle: Any
    world: Any

    def all_gather(self, x: Tensor, counted: bool = True) -> Tensor:
        """In a ring."""
        ...


def all_gather(group: Reachable, x: Tensor) -> Tensor:
    """(size, *x.shape): `x`, of equal shape everywhere and contiguous, of each rank."""
    if group.handle is None or group.size <= RING or group.world.backend == "nccl":
        return group.all_gather(x, counted=False)
    found = x.new_empty((group.size, *x.shape))
    first, parts = group.ranks[0], [*found] if group.index == 0 else None
    group.world.wait(dist.gather(x, parts, first, group=group.handle, async_op=True))
    group.world.wait(dist.broadcast(found, first, group=group.handle, async_op=True))
    return found


def start_broadcast(group: Reachable, x: Tensor, source: int) -> Any:
    """Begins to fill `x` with that of a rank of the world; the work to wait for, if any."""
    if group.size == 1:
        return None
    return dist.broadcast(x, source, group=group.handle, async_op=True)
