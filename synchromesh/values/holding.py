"""A holding: which boxes of a parameter or buffer each position has, and over which positions its
gradient is summed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from synchromesh.values.component import Parameter
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, REPLICATED_PARTIAL_GRADIENT, Box, Placement


@dataclass(frozen=True)
class Holding:
    """One tensor over the positions of a stage: `placement` on the tensor axis of `layout`; or
    over those of several stages that use it, each of which has all of it (`shared`)."""

    tensor: Parameter
    layout: Layout
    placement: Placement = REPLICATED
    shared: tuple[int, ...] = ()

    @property
    def positions(self) -> Sequence[int]:
        """Those that hold it, in ascending order; other positions have nothing of it."""
        return self.shared or self.layout.positions

    @property
    def home(self) -> bool:
        """Whether every position has the global tensor and a partial sum of its gradient."""
        return self.placement == REPLICATED_PARTIAL_GRADIENT

    @property
    def gradient_layout(self) -> Layout:
        """The layout whose data ranks sum this tensor's gradient (docs/design.md, "Gradients")."""
        if not self.home:
            return self.layout
        return Layout(len(self.positions), 1, first=self.positions[0])

    def boxes(self, position: int) -> tuple[Box, ...]:
        """The boxes of the tensor at `position`, in local order."""
        if position not in self.positions:
            return ()
        if self.home:
            return REPLICATED.boxes(self.tensor.shape, 1, 0)
        index = self.layout.tensor_index(position)
        return self.placement.boxes(self.tensor.shape, self.layout.tensor, index)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what a position holds at most, as the first one does."""
        return self.placement.local_shape(self.tensor.shape, self.layout.tensor)

    @property
    def local_bytes(self) -> int:
        """Bytes of what a position holds at most: what a plan is priced by."""
        return replace(self.tensor, shape=self.local_shape).bytes

    def bytes_at(self, position: int) -> int:
        """Bytes of what `position` holds."""
        if position not in self.positions:
            return 0
        index = self.layout.tensor_index(position)
        shape = self.placement.local_shape(self.tensor.shape, self.layout.tensor, index)
        return replace(self.tensor, shape=shape).bytes

    @property
    def summed(self) -> bool:
        """Whether several positions sum its gradient, which then lies in a bucket."""
        return self.gradient_layout.data > 1

    def gradient_positions(self, position: int) -> tuple[int, ...]:
        """Positions over which its gradient is summed, of which `position` is one."""
        return tuple(self.positions) if self.home else self.layout.data_positions(position)

    @property
    def copies(self) -> int:
        """How many positions hold an equal copy of what one position holds."""
        return self.layout.data if self.placement.sharded else len(self.positions)


def holdings(
    tensors: Iterable[Parameter],
    placements: Mapping[tuple[str, Layout], Placement],
    devices: int,
) -> dict[str, Holding]:
    """Where each tensor lies: as its one layout uses it; where layouts differ replicated on all
    positions of the stages that use it; where none uses it, on all `devices`.
    """
    uses: dict[str, list[tuple[Layout, Placement]]] = {}
    for (name, layout), placement in placements.items():
        uses.setdefault(name, []).append((layout, placement))
    found = {}
    for tensor in tensors:
        match uses.get(tensor.name, []):
            case [(layout, placement)]:
                found[tensor.name] = Holding(tensor, layout, placement)
            case several:
                users = sorted({p for layout, _ in several for p in layout.positions})
                everywhere = users or range(devices)
                layout = Layout(len(everywhere), 1, first=everywhere[0])
                shared = () if tuple(layout.positions) == tuple(everywhere) else tuple(everywhere)
                found[tensor.name] = Holding(tensor, layout, REPLICATED_PARTIAL_GRADIENT, shared)
    return found
