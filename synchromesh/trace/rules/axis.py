"""The tensor axis as local graphs see it: moves between placements, random streams, batch norm."""

from typing import Protocol

from torch import Tensor


class TensorAxis(Protocol):
    """What a local graph may ask of the ranks that share its rows; the engine implements it."""

    size: int  # ranks on the axis
    index: int  # this rank's place among them

    def move(self, x: Tensor, source: str, target: str, length: int = 0) -> Tensor:
        """`x` from one placement to another, value and gradient (table in docs/design.md).

        length: entries of the dimension that the source shards; 0: size times those of `x`."""

    def maximum(self, x: Tensor) -> Tensor:
        """The elementwise largest of the ranks' `x`, without gradient."""

    def stream(self, key: int, sharded: bool, rows: bool) -> None:
        """Seeds the default generator for random operator `key`; `sharded`: bits differ along
        the axis; `rows`: and with the rows of the batch."""

    def batch_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Batch norm in training mode: the engine decides over which rows its statistics are
        taken."""
