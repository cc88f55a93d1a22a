"""A silent group: the shapes and local work of a group's collectives, without anybody to talk to.

A program that runs on silent groups computes on tensors of the right shapes as if alone, so its
computation can be timed apart from traffic. Numbers are wrong where ranks would have added up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.communicator import Finish


class SilentGroup:
    """What programs ask of `engine.groups.Group`, answered by this rank alone."""

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index
        self.ranks = tuple(range(size))

    def all_reduce(
        self, x: Tensor, op: str = "sum", asynchronous: bool = False, counted: bool = True
    ) -> Any:
        return None

    def start_all_reduce(self, x: Tensor) -> Finish:
        whole = x.detach().clone(memory_format=torch.contiguous_format)
        return lambda: whole

    def all_gather(self, x: Tensor, counted: bool = True) -> Tensor:
        return self.start_all_gather(x)()

    def start_all_gather(self, x: Tensor, counted: bool = True) -> Finish:
        part = x.detach().contiguous()
        return lambda: part.unsqueeze(0).expand(self.size, *part.shape).contiguous()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.start_reduce_scatter(x)()

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        part = x.detach().contiguous()[self.index].clone()
        return lambda: part

    def start_all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None
    ) -> Callable[[], list[Tensor]]:
        wanted = [tuple(s) for s in (shapes or [p.shape for p in parts])]
        packed = torch.cat([p.detach().reshape(-1) for p in parts])
        count = sum(torch.Size(s).numel() for s in wanted)
        received = packed.new_empty(count)
        received.zero_() if count > len(packed) else received.copy_(packed[:count])

        def finish() -> list[Tensor]:
            pieces = received.split([torch.Size(s).numel() for s in wanted])
            return [p.view(s) for p, s in zip(pieces, wanted, strict=True)]

        return finish
