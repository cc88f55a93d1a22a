"""A communicator: the collectives that moves on a tensor axis ask of the ranks they run on.

`engine.groups.Group` runs them over the network, `SilentGroup` makes their shapes alone. Who walks
a program needs no more than this, and so no `torch.distributed`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Op = Literal["sum", "max"]
Finish = Callable[[], Tensor]  # waits for a collective under way and returns its result


class Communicator(Protocol):
    """Ranks that run collectives together; `start_*` begins one and returns how to finish it."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Any: ...

    def start_all_reduce(self, x: Tensor) -> Finish: ...

    def start_all_gather(self, x: Tensor) -> Finish:
        """Begins to gather (size, *x.shape)."""

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        """Begins to sum (size, *part) and to leave each rank its part."""

    def start_all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None,
        payload: int | None = None,
    ) -> Callable[[], list[Tensor]]:  # fmt: skip
        """Begins to send part i to rank i; shapes: of what comes back (None: as `parts`). payload:
        bytes to count, of the largest rank's parts (None: of these)."""


class SilentGroup:
    """A `Communicator` of this rank alone, with the shapes and local work of a group's
    collectives: a program on silent groups computes as if alone, so that its computation is timed
    apart from traffic. What ranks would have added up is wrong."""

    def __init__(self, size: int, index: int = 0) -> None:
        self.size, self.index = size, index

    def all_reduce(self, x: Tensor, op: Op = "sum") -> None:
        """Leaves `x` as it is."""

    def start_all_reduce(self, x: Tensor) -> Finish:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        return lambda: total

    def start_all_gather(self, x: Tensor) -> Finish:
        part = x.detach().contiguous()
        return lambda: part.unsqueeze(0).expand(self.size, *part.shape).contiguous()

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        part = x.detach().contiguous()[self.index].clone()
        return lambda: part

    def start_all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None,
        payload: int | None = None,
    ) -> Callable[[], list[Tensor]]:  # fmt: skip
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
