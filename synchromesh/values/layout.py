"""A layout: how one component lies on the K devices of its stage, `data x tensor = K`.

Position p of the stage (its p-th rank) has data index `p // tensor` and tensor index `p % tensor`:

    data=2, tensor=3      tensor index   0  1  2
              data index 0   positions   0  1  2      one block of batch rows
              data index 1   positions   3  4  5      another block of batch rows

Ranks of a line share the rows and split the component's parameters; ranks of a column have the
same part of the parameters and sum its gradients.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

ShardStates = Literal["none", "optimizer", "gradients", "parameters"]  # ZeRO stage 0, 1, 2, 3


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of data and tensor parallelism; states sharded over data ranks; recomputation."""

    data: int = 1
    tensor: int = 1
    shard_states: ShardStates = "none"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise ValueError(
                f"degrees must be at least 1: data({self.data}) x tensor({self.tensor})"
            )

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"

    @property
    def devices(self) -> int:
        """Devices of the stage, data x tensor."""
        return self.data * self.tensor

    def data_index(self, position: int) -> int:
        """The block of batch rows that a position computes."""
        return position // self.tensor

    def tensor_index(self, position: int) -> int:
        """The part of the parameters that a position has."""
        return position % self.tensor

    def tensor_positions(self, position: int) -> tuple[int, ...]:
        """Positions that share the rows of `position` (its line in the picture above)."""
        first = position - position % self.tensor
        return tuple(range(first, first + self.tensor))

    def data_positions(self, position: int) -> tuple[int, ...]:
        """Positions that have the same part of the parameters (its column)."""
        return tuple(range(position % self.tensor, self.devices, self.tensor))


def leaf_layout(layouts: Iterable[Layout]) -> Layout:
    """How the rows of a batch lie on the devices of a stage: by the largest data degree of its
    components."""
    finest = max(layouts, key=lambda layout: layout.data)
    return Layout(finest.data, finest.tensor)
