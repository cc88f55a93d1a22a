"""What traffic of a step gets of links beside other traffic that goes on at the same time.

A lane is what goes one after another (`cost/timeline.py`): the collectives of a pattern in a
device group, its messages with servers, or those of a kind from a stage to another one. It takes
every link between hosts that a flow of it goes through, as often as flows do, and its flows are
all as quick as the slowest. Lanes rise together until a link of theirs is full (`fair_shares.py`):

    share of a lane  =  min(1, rate beside the others / rate for which its curve stands)

The curve of a collective stands for all device groups that do the same at once
(`network.curves`), that of messages for themselves."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from synchromesh.cost.planned_step import PlannedStep
from synchromesh.estimate.fair_shares import NONE, fair_shares
from synchromesh.estimate.network import crossings_of
from synchromesh.values.cluster import Cluster
from synchromesh.values.profile import Pattern, ServerMessages

# A device group and its pattern, all groups and one that goes beyond each of them, as sums of what
# several stages use do, or all and a message's kind and stages.
Lane = tuple[int, object]
Flows = NDArray[np.int64]  # of a lane through each link
_Taken = tuple[Flows, float]  # with the most that a flow gets, a host's link being 1


class SharedLinks:
    """Of a plan's step on a cluster."""

    ALL: ClassVar = -1  # in place of a device group

    def __init__(self, cluster: Cluster, planned: PlannedStep) -> None:
        self.cluster, self.planned = cluster, planned
        self._lanes: dict[Lane, _Taken | None] = {}
        self._references: dict[Lane, float] = {}
        self._shares: dict[frozenset[Lane], Mapping[Lane, float]] = {}
        # Links are alike that have the same capacity and carry as much of every lane: the same
        # sum of random numbers tells them. One of each kind is looked at.
        self._random = np.random.default_rng(0)
        _, self._kinds = np.unique(cluster.levels.capacities, return_inverse=True)
        self._looked_at: NDArray[np.intp] | None = None

    def lane(self, group: int, of: object) -> Lane | None:
        """That of a pattern or of messages; None where it takes no link between hosts."""
        ranks = of.ranks if isinstance(of, ServerMessages) else of
        inside = isinstance(ranks, Pattern) and ranks.size * ranks.stride <= len(
            self.planned.positions[group]
        )
        lane = (group if inside else self.ALL, of)
        return lane if self._taken(lane) else None

    def shares(self, lanes: frozenset[Lane]) -> Mapping[Lane, float]:
        """The part of its own speed that each lane has while all of them are under way."""
        if lanes not in self._shares:
            rates = self._rates(lanes)
            self._shares[lanes] = {x: min(1.0, r / self._reference(x)) for x, r in rates.items()}
        return self._shares[lanes]

    def _reference(self, lane: Lane) -> float:
        if lane not in self._references:
            groups = [self.ALL] if lane[0] == self.ALL else range(len(self.planned.positions))
            alike = [x for group in groups if self._taken(x := (group, lane[1]))]
            slowest = min(self._rates(alike).values())
            self._references |= dict.fromkeys(alike, slowest)
        return self._references[lane]

    def _rates(self, lanes: Iterable[Lane]) -> dict[Lane, float]:
        """What a flow of each gets; each has a link of its own, too, that ends at its most."""
        taken = {lane: found for lane in lanes if (found := self._taken(lane))}
        if self._looked_at is None:
            _, self._looked_at = np.unique(self._kinds, return_index=True)
        flows = np.stack([f[self._looked_at] for f, _ in taken.values()])
        own, most = np.eye(len(taken), dtype=np.int64), [most for _, most in taken.values()]
        counts = np.hstack([flows, own])
        capacities = np.concatenate([self.cluster.levels.capacities[self._looked_at], most])
        routes = np.where(counts > 0, np.arange(counts.shape[1]), NONE)
        rates = fair_shares(routes, capacities, counts.astype(float)).tolist()
        return dict(zip(taken, rates, strict=True))

    def _taken(self, lane: Lane) -> _Taken | None:
        if lane not in self._lanes:
            self._lanes[lane] = taken = self._flows(lane)
            if taken is not None:
                self._kinds = self._kinds + taken[0] * self._random.integers(1 << 62)
                self._looked_at = None
        return self._lanes[lane]

    def _flows(self, lane: Lane) -> _Taken | None:
        found = [
            crossing
            for ranks in self._talking(lane)
            for crossing in crossings_of(
                self.cluster, 0, Counter(self.cluster.host_of[r] for r in ranks),
                "all_reduce" if isinstance(lane[1], Pattern) else "send",
            )
        ]  # fmt: skip
        if not found:
            return None
        levels = self.cluster.levels
        ends = np.array([(c.source, c.target) for c in found])
        links = levels.routes(ends[:, 0], ends[:, 1])
        flows = np.bincount(links[links != NONE], minlength=len(levels.capacities))
        return flows, min(c.fills for c in found)

    def _talking(self, lane: Lane) -> Iterable[Sequence[int]]:
        """The ranks of each group of a pattern, or of those between which a message goes."""
        planned, (group, of) = self.planned, lane
        if isinstance(of, Pattern | ServerMessages):
            ranks = of if isinstance(of, Pattern) else of.ranks
            its = range(planned.devices) if group == self.ALL else planned.positions[group]
            for places in ranks.groups(len(its)):
                talking = [planned.ranks[its[p]] for p in places]
                yield from [talking] if isinstance(of, Pattern) else of.pairs(talking)
            return
        kind, source, target = cast(tuple[str, int, int], of)
        a, b = (planned.positions[planned.of[stage]] for stage in (source, target))
        count = max(len(a), len(b))
        for n in range(count):
            pair = [planned.ranks[x[n * len(x) // count]] for x in (a, b)]
            yield pair if kind == "F" else pair[::-1]
