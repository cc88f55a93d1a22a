"""Announced collectives: ranks of a group say which one comes next before they run it.

A model that runs as it is may take another branch on every rank, and a rank without rows does not
run it at all. Each collective is preceded by a small all-gather of what comes:

    rank 0    gather 17   gather 17   end
    rank 1    gather 17   end                    ->  an error on all ranks, no wait for ever
    rank 2    (no rows)   (no rows)              takes part with zeros"""

import torch
from torch import Tensor

from synchromesh.engine import control_channel
from synchromesh.engine.groups import Group

FOLLOW, GATHER, REDUCE, END = range(4)
NAMES = {GATHER: "gathers statistics", REDUCE: "sums gradients", END: "is done"}
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AnnouncedCollectives:
    """`all_gather` and `all_reduce` of a group; `end` after a pass, `follow` in its place."""

    def __init__(self, group: Group) -> None:
        self.group, self.size = group, group.size

    def all_gather(self, x: Tensor) -> Tensor:
        """As the group's."""
        self._announce(GATHER, x)
        return self.group.all_gather(x)

    def all_reduce(self, x: Tensor) -> None:
        """As the group's."""
        self._announce(REDUCE, x)
        self.group.all_reduce(x)

    def end(self) -> None:
        """This rank's forward, or backward, is over."""
        self._announce(END, None)

    def follow(self) -> None:
        """Takes part with zeros in all that the others do until they end."""
        while True:
            kind, numbers, place = self._next([FOLLOW, 0, 0])
            if kind == END:
                return
            zeros = torch.zeros(numbers, dtype=TYPES[place], device=self.group.world.device)
            if kind == GATHER:
                self.group.all_gather(zeros)
            else:
                self.group.all_reduce(zeros)

    def _announce(self, kind: int, x: Tensor | None) -> None:
        self._next([kind, 0, 0] if x is None else [kind, x.numel(), TYPES.index(x.dtype)])

    def _next(self, announced: list[int]) -> tuple[int, ...]:
        """What the ranks with rows do next; ValueError on all where they do not agree."""
        device = self.group.world.device
        table = control_channel.all_gather_numbers(self.group, announced, device)
        acting = [(rank, row) for rank, row in zip(self.group.ranks, table, strict=True) if row[0]]
        first, wanted = acting[0]
        for rank, row in acting:
            if row != wanted:
                raise ValueError(
                    "ranks took different branches of a model that runs as it is, so that its "
                    f"batch norms cannot be synchronised (rank {first} {NAMES[wanted[0]]} of "
                    f"{wanted[1]} numbers, rank {rank} {NAMES[row[0]]} of {row[1]}): train with "
                    "sync_batch_norm=False, or write the model without branches on values and "
                    "random numbers"
                )
        return wanted
