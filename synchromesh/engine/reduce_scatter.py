"""Ways to carry out a reduce-scatter, of which each group takes the one that is quickest for it.

    native        the backend's own: gloo's takes as long as an all-reduce
    all-to-all    each rank gets all parts of its own and adds them up
    all-reduce    and the rest is dropped
    ring          size - 1 rounds, in each of which a rank hands what it has of a part to the next:
                  what is sent is least, and one message goes each way at a time

Seconds of 8 MB on four emulated hosts with 40 % of a core:

    links             native    all-to-all    all-reduce    ring      (an all-gather)
    200 Mbit/s        0.52      0.35          0.53          0.26       0.26
    1,000 Mbit/s      0.27      0.16          0.27          0.13-0.17  0.15"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from synchromesh.engine.movable import movable, resolved
from synchromesh.programs.communicator import Finish

# torch 2.13 renamed it and warns at the old name
_native = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PLAIN = ("native", "all-to-all", "all-reduce")  # for every group
WAYS = (*PLAIN, "ring")


class Scattering(Protocol):
    """What a reduce-scatter asks of a group of ranks."""

    index: int
    size: int
    handle: Any
    world: Any
    ring: Any  # the process group of rings, where there is one
    rings: "list[Ring]"  # under way, the first of which is at work

    def barrier(self) -> None: ...

    def broadcast_json(self, value: Any, root: int = 0) -> Any: ...


def begin(group: Scattering, x: Tensor, way: str) -> Finish:
    """Begins to sum x: (size, *part) over the ranks and to leave each its part."""
    after: Callable[[Any, Finish], Finish] = group.world.after
    x = resolved(x).contiguous()
    if way == "all-reduce" or x.dtype is torch.int16:
        total = x.to(torch.int32) if x.dtype is torch.int16 else x.clone()
        work = dist.all_reduce(total, group=group.handle, async_op=True)
        # a view would keep all of it alive
        return after(work, lambda: total[group.index].to(x.dtype, copy=True))
    if way == "all-to-all":
        parts = torch.empty_like(x)
        work = dist.all_to_all_single(parts, x, group=group.handle, async_op=True)
        return after(work, lambda: parts.sum(0))
    if way == "ring":
        return Ring(group, x)
    assert way == "native", way
    part = torch.empty_like(x[0])
    work = _native(part.view(-1), x.view(-1), group=group.handle, async_op=True)
    return after(work, lambda: part)


class Ring:
    """A reduce-scatter under way in a ring; `advance` now and then lets it go on meanwhile.

        round 1    rank i sends its own of part i - 1 to i + 1, and gets part i - 2 from i - 1
        round k    it adds its own to what it got, and sends that on

    Rounds are all-to-alls in which all but one part are empty: of messages between two ranks gloo
    does not tell whether they have come. They begin when a rank comes by, so they have a process
    group of their own, in which one ring follows the other: its collectives have one order."""

    def __init__(self, group: Scattering, x: Tensor) -> None:
        self.group, self._x = group, x
        self._round = 0
        self._sum = x[group.index - 1].clone()
        self._work: Any = None
        self.over = False
        group.rings.append(self)
        if group.rings[0] is self:
            self.begin()

    def begin(self) -> None:
        index, size = self.group.index, self.group.size
        self._got = torch.empty_like(self._sum)
        sent, got = movable(self._sum).view(-1), movable(self._got).view(-1)
        outward, inward = [0] * size, [0] * size
        outward[(index + 1) % size] = inward[index - 1] = sent.numel()
        self._work = dist.all_to_all_single(
            got, sent, inward, outward, group=self.group.ring, async_op=True
        )
        self._round += 1

    def advance(self) -> bool:
        """Goes on where a round is over; whether it did."""
        if not self._work.is_completed():
            return False
        self.end_round()
        return True

    def end_round(self) -> None:
        """Waits for the round, adds this rank's own, begins the next round or the next ring."""
        self.group.world.wait(self._work)
        part = (self.group.index - 1 - self._round) % self.group.size
        self._sum = self._got.add_(self._x[part])
        if self._round < self.group.size - 1:
            return self.begin()
        self.over = True
        rings = self.group.rings
        rings.pop(0)
        if rings:
            rings[0].begin()

    def __call__(self) -> Tensor:
        """Waits for all rounds, and for the rings before it; this rank's part of the sum."""
        while not self.over:
            self.group.rings[0].end_round()
        return self._sum


def quickest(
    group: Scattering, payload: int, most: int = 2 << 20, runs: int = 5, margin: float = 0.15
) -> str:
    """The quickest way for about `payload` bytes, agreed over the group; collective. Of those that
    are about as quick the first one, so that equal runs take equal ways.

    most: bytes that are scattered. runs: of each way, in turns, whose median counts: on four
    emulated hosts single runs scatter by 20 %. margin: by which a way must be quicker than those
    before it: a ring takes 0.76 of an all-to-all's time at 200 Mbit/s, at 1,000 0.84 to 1.06."""
    numbers = max(1, min(payload, most) // 4 // group.size)
    x = torch.zeros(group.size, numbers, device=group.world.device)
    ways = PLAIN if group.ring is None else WAYS
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for way in taken:
        begin(group, x[:, :1], way)()  # what only a first call does
    for _ in range(runs):
        for way, seconds in taken.items():
            group.barrier()
            start = time.perf_counter()
            begin(group, x, way)()
            group.barrier()
            seconds.append(time.perf_counter() - start)
    middle = {way: median(seconds) for way, seconds in taken.items()}
    enough = min(middle.values()) * (1 + margin)
    return str(group.broadcast_json(next(way for way in middle if middle[way] <= enough)))
