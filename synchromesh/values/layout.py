"""A layout: how one component lies on the K devices of its stage, `data x tensor = K`.

A position is an index into the plan's ranks. The stage's positions begin at `first`; counted from
there, position p has data index `p // tensor` and tensor index `p % tensor`:

    data=2, tensor=3, first=4      tensor index   0  1  2
                       data index 0   positions   4  5  6      one block of batch rows
                       data index 1   positions   7  8  9      another block of batch rows

Ranks of a line share the rows and split the component's parameters; ranks of a column have the
same part of the parameters and sum its gradients."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

ShardStates = Literal["none", "optimizer", "gradients", "parameters"]  # names of levels


class ShardLevel(NamedTuple):
    """A level of sharded states (ZeRO): its word in plans, and what the data ranks share out."""

    word: str
    sharded: tuple[str, ...]


# from the least to the most that is shared out
LEVELS: dict[ShardStates, ShardLevel] = {
    "none": ShardLevel("", ()),
    "optimizer": ShardLevel("zero1", ("optimizer state",)),
    "gradients": ShardLevel("zero2", ("optimizer state", "gradients")),
    "parameters": ShardLevel("zero3", ("optimizer state", "gradients", "parameters")),
}
STATES = tuple(LEVELS)


@dataclass(frozen=True, order=True)
class Layout:
    """Degrees of data and tensor parallelism; states sharded over data ranks; recomputation; the
    first position of the stage."""

    data: int = 1
    tensor: int = 1
    shard_states: ShardStates = "none"
    recompute: bool = False
    first: int = 0

    def __post_init__(self) -> None:
        if self.data < 1 or self.tensor < 1:
            raise ValueError(
                f"degrees must be at least 1: data({self.data}) x tensor({self.tensor})"
            )
        if self.first < 0:
            raise ValueError(f"a stage's first position is at least 0, not {self.first}")

    def __str__(self) -> str:
        degrees = f"{self.data}x{self.tensor}" + (f"@{self.first}" if self.first else "")
        words = degrees, LEVELS[self.shard_states].word, "recomputed" * self.recompute
        return " ".join(filter(None, words))

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    @cached_property
    def mesh(self) -> "Layout":
        """Degrees and positions alone: equal meshes have the same rows and groups on each rank."""
        return Layout(self.data, self.tensor, first=self.first)

    @cached_property
    def positions(self) -> range:
        return range(self.first, self.first + self.devices)

    def data_index(self, position: int) -> int:
        """The block of batch rows that a position computes."""
        return (position - self.first) // self.tensor

    def tensor_index(self, position: int) -> int:
        """The part of the parameters that a position has."""
        return (position - self.first) % self.tensor

    def tensor_positions(self, position: int) -> tuple[int, ...]:
        """Positions that share the rows of `position` (its line in the picture above)."""
        line = position - self.tensor_index(position)
        return tuple(range(line, line + self.tensor))

    def data_positions(self, position: int) -> tuple[int, ...]:
        """Positions that have the same part of the parameters (its column)."""
        return tuple(self.positions[self.tensor_index(position) :: self.tensor])


def leaf_layouts(layouts: Iterable[Layout]) -> dict[range, Layout]:
    """How a batch's rows lie on each stage's devices: by the largest data degree there."""
    finest: dict[range, Layout] = {}
    for layout in layouts:
        known = finest.get(layout.positions)
        if known is None or layout.data > known.data:
            finest[layout.positions] = Layout(layout.data, layout.tensor, first=layout.first)
    return finest


def leaf_layout_at(leaves: Mapping[range, Layout], position: int) -> Layout:
    return next(layout for positions, layout in leaves.items() if position in positions)


def groups_of(layouts: Sequence[Layout]) -> tuple[int, ...]:
    """The group of devices of each stage, counted in the order of their positions."""
    firsts = [layouts[stage[0]].first for stage in stages_of(layouts)]
    order = sorted(set(firsts))
    return tuple(map(order.index, firsts))


def stages_of(layouts: Sequence[Layout]) -> tuple[range, ...]:
    """The components of each stage, from the layouts of a chain: neighbours on the same devices
    are one stage; devices that come again have several.

        first    0  0 | 2  2 | 0 | 2           stages  0:2  2:4  4:5  5:6"""
    at = [layout.positions for layout in layouts]
    starts = [i for i in range(len(at)) if i == 0 or at[i] != at[i - 1]]
    return tuple(map(range, starts, [*starts[1:], len(layouts)]))
