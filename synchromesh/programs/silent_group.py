"""A silent group: the shapes and local work of a group's collectives, without anybody to talk to.

A program that runs on silent groups computes on tensors of the right shapes as if alone, so its
computation can be timed apart from traffic. Numbers are wrong where ranks would have added up."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from synchromesh.programs.communicator import Finish, Op


class SilentGroup:
    """A `Communicator` of this rank alone."""

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        """Leaves `x` as it is."""

    def start_all_reduce(self, x: Tensor) -> Finish:
        """A copy of `x`."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        return lambda: total

    def start_all_gather(self, x: Tensor) -> Finish:
        """`x` as every rank's."""
        part = x.detach().contiguous()
        return lambda: part.unsqueeze(0).expand(self.size, *part.shape).contiguous()

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        """This rank's part of `x`."""
        part = x.detach().contiguous()[self.index].clone()
        return lambda: part

    def start_all_to_all(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        payload: int | None = None,
    ) -> Callable[[], list[Tensor]]:
        """What this rank sends, in the shapes that it would receive."""
        wanted = [tuple(s) for s in (shapes or [p.shape for p in parts])]
        packed = torch.cat([p.detach().reshape(-1) for p in parts])
        count = sum(torch.Size(s).numel() for s in wanted)
        received = packed.new_empty(count)
        received.zero_() if count > len(packed) else received.copy_(packed[:count])

        def finish() -> list[Tensor]:
            pieces = received.split([torch.Size(s).numel() for s in wanted])
            return [p.view(s) for p, s in zip(pieces, wanted, strict=True)]

        return finish
