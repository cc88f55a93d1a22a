"""A communicator: the collectives that moves on a tensor axis ask of the ranks they run on.

`engine.groups.Group` runs them over the network, `programs.silent_group.SilentGroup` makes their
shapes alone. Who walks a program needs no more than this, and so no `torch.distributed`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Op = Literal["sum", "max"]
Finish = Callable[[], Tensor]  # waits for a collective under way and returns its result


class Communicator(Protocol):
    """Ranks that run collectives together; `start_*` begins one and returns how to finish it."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def index(self) -> int:
        """This rank's place among them."""

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Any:
        """Sum or maximum over the ranks, in place."""

    def start_all_reduce(self, x: Tensor) -> Finish:
        """Begins the sum over the ranks."""

    def start_all_gather(self, x: Tensor) -> Finish:
        """Begins to gather (size, *x.shape)."""

    def start_reduce_scatter(self, x: Tensor) -> Finish:
        """Begins to sum (size, *part) and to leave each rank its part."""

    def start_all_to_all(
        self,
        parts: Sequence[Tensor],
        shapes: Sequence[Sequence[int]] | None = None,
        payload: int | None = None,
    ) -> Callable[[], list[Tensor]]:
        """Begins to send part i to rank i; shapes: of what comes back (None: as `parts`).

        payload: bytes to count, of the largest rank's parts (None: of these)."""
