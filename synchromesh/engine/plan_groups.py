"""The groups of a plan: the ranks that take part, this rank's place among them."""

from collections.abc import Iterable

from synchromesh.engine.groups import Group, World
from synchromesh.values.layout import Layout


class PlanGroups:
    """Ranks in order, with the groups of every layout that is used on them.

    Creating groups is collective: every rank of the world makes the same `PlanGroups`, the idle
    ones too (their `position` is None and their groups hold only themselves).
    """

    def __init__(self, world: World, ranks: tuple[int, ...], layouts: Iterable[Layout]) -> None:
        self.world = world
        self.ranks = ranks
        self.position = ranks.index(world.rank) if world.rank in ranks else None
        self._idle: list[tuple[int, ...]] = [(r,) for r in range(world.size) if r not in ranks]
        self.everyone = self._group([tuple(range(len(ranks)))])  # all ranks that take part
        self._tensor: dict[int, Group] = {}
        self._data: dict[int, Group] = {1: self.everyone}
        for layout in sorted({Layout(x.data, x.tensor) for x in layouts}):
            positions = range(layout.devices)
            lines = {layout.tensor_positions(p) for p in positions}
            columns = {layout.data_positions(p) for p in positions}
            self._tensor[layout.tensor] = self._group(sorted(lines))
            self._data[layout.tensor] = self._group(sorted(columns))

    def _group(self, positions: list[tuple[int, ...]]) -> Group:
        return self.world.groups(
            [tuple(self.ranks[p] for p in line) for line in positions] + self._idle
        )

    def tensor_group(self, layout: Layout) -> Group:
        """The ranks that share this rank's rows under `layout`."""
        return self._tensor[layout.tensor]

    def data_group(self, layout: Layout) -> Group:
        """The ranks that hold this rank's part of the parameters under `layout`."""
        return self._data[layout.tensor]
