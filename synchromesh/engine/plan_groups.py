"""The groups of a plan: the ranks that take part, this rank's place among them."""

from collections.abc import Collection, Iterable

from synchromesh.engine.groups import Group
from synchromesh.engine.world import World
from synchromesh.values.holding import Holding
from synchromesh.values.layout import Layout

Positions = tuple[int, ...]


class PlanGroups:
    """Ranks in order, with the groups of every layout that is used on them, and those of ranks in
    several stages that hold the same tensor.

    Creating groups is collective: every rank of the world makes the same `PlanGroups`, the idle
    ones too (their `position` is None and their groups hold only themselves)."""

    def __init__(
        self,
        world: World,
        ranks: tuple[int, ...],
        layouts: Collection[Layout],
        holdings: Collection[Holding] = (),
        others: Iterable[Layout] = (),
    ) -> None:
        """others: that no component has in training."""
        self.world = world
        self.ranks = ranks
        self.position = ranks.index(world.rank) if world.rank in ranks else None
        self.everyone = self._group([tuple(range(len(ranks)))])  # all ranks that take part
        self.alone = self._group(())
        self._tensor: dict[Layout, Group] = {}
        self._data: dict[Layout, Group] = {}
        for mesh in sorted(
            {x.mesh for x in (*layouts, *others)}, key=lambda mesh: (mesh.first, mesh)
        ):
            self._tensor[mesh] = self._group({mesh.tensor_positions(p) for p in mesh.positions})
            self._data[mesh] = self._group({mesh.data_positions(p) for p in mesh.positions})
        shared = {tuple(h.positions) for h in holdings if h.partial_gradient and not h.alone}
        self.workers = workers(layouts) if any(h.alone for h in holdings) else ()
        self.worker = self._group(self.workers)
        self._partial = {positions: self._group([positions]) for positions in sorted(shared)}
        self._served = {its: self._group(its, "servers") for its in _served(holdings)}
        scattered = _served([h for h in holdings if h.scattered])
        self._fetching = {its: self._group(its, "fetches") for its in scattered}
        for positions in sorted(_scattered(holdings)):
            world.add_ring(tuple(ranks[p] for p in positions))

    def _group(self, positions: Iterable[Positions], purpose: str = "") -> Group:
        """Makes the groups of these positions; that of this rank, or of it alone."""
        made = [tuple(self.ranks[p] for p in line) for line in sorted(positions)]
        members = {r for line in made for r in line}
        return self.world.groups(
            [*made, *((r,) for r in range(self.world.size) if r not in members)], purpose
        )

    def stage_group(self, layouts: Iterable[Layout]) -> Group:
        """The ranks of this rank's stage. All ranks of the world call alike."""
        return self._group({tuple(layout.positions) for layout in layouts})

    def tensor_group(self, layout: Layout) -> Group:
        """The ranks that share this rank's rows under `layout`."""
        return self._tensor[layout.mesh]

    def data_group(self, layout: Layout) -> Group:
        """The ranks that hold this rank's part of the parameters under `layout`."""
        return self._data[layout.mesh]

    def sum_group(self, holding: Holding) -> Group:
        """The ranks over which this rank sums the gradient of a tensor that it holds."""
        if holding.alone:
            mesh = holding.layout.mesh
            return self._tensor[mesh] if holding.partial_gradient else self.alone
        if holding.servers:
            return self.served_group(holding)
        if holding.partial_gradient:
            return self._partial[tuple(holding.positions)]
        return self._data[holding.layout.mesh]

    def served_group(self, holding: Holding) -> Group:
        """The ranks that push gradients of what this rank holds to the first of them."""
        return self._served[frozenset(holding.sharing(p) for p in holding.positions)]

    def gather_group(self, holding: Holding) -> Group:
        """The ranks that gather what each keeps of a tensor. What servers send has connections of
        its own: on others a receiver's word that it is ready comes behind all that it pushes."""
        if not holding.servers:
            return self.sum_group(holding)
        return self._fetching[frozenset(holding.sharing(p) for p in holding.positions)]


def workers(layouts: Iterable[Layout]) -> tuple[Positions, ...]:
    """The positions of each data index, over all stages."""
    found: dict[int, set[int]] = {}
    for mesh in {layout.mesh for layout in layouts}:
        for position in mesh.positions:
            found.setdefault(mesh.data_index(position), set()).add(position)
    return tuple(tuple(sorted(found[index])) for index in sorted(found))


def _served(holdings: Collection[Holding]) -> list[frozenset[Positions]]:
    """The groups of those that push gradients to the first of them."""
    sharing = {frozenset(h.sharing(p) for p in h.positions) for h in holdings if h.servers}
    return sorted(sharing, key=sorted)


def _scattered(holdings: Collection[Holding]) -> set[Positions]:
    """The groups that scatter gradients."""
    return {h.gradient_positions(p) for h in holdings if h.states != "none" for p in h.positions}
