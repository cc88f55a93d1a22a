"""A live run at the end of a step: what the adapter asks of the ranks; all call alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from synchromesh.adapt.monitor import Drift
from synchromesh.checkpoint.switch import Moved
from synchromesh.cost.move import most_received, transfer_seconds
from synchromesh.planner.candidate import planned_step
from synchromesh.planner.choice import Choice
from synchromesh.planning.live import LiveSession
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.reprofile import IdleProbe, probe_idle, reprofile
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class LiveRun:
    """Ranks of this run, under `plan` as candidates are written; `switch` shifts to another."""

    facts: LiveFacts
    plan: Plan
    partition: Partition
    switch: Callable[[Plan], Moved]

    @property
    def idle(self) -> bool:
        return len(self.plan.devices(self.facts.world.size)) < self.facts.world.size

    def clock(self) -> float:
        """Seconds, as rank 0 has them where that matters (`agreed`)."""
        return time.monotonic()

    def agreed(self, find: Callable[[], Any]) -> Any:
        """What rank 0 finds, as JSON."""
        world = self.facts.world
        return world.everyone.broadcast_json(find() if world.rank == 0 else None)

    def measure(self, known: Profile, drift: Drift) -> Choice:
        """What has drifted is sampled, on idle ranks too; the plans by it, ValueError for none.
        Those are left out whose ranks end no step together: what one takes says little of them."""
        world = self.facts.world
        links = drift.links or (drift.devices and world.device.type == "cuda")
        ranks = range(world.size)
        sampled = reprofile(self.facts, ranks, self.partition, known, drift.devices, links)
        choice = LiveSession(self.facts).reconsider(sampled, self.plan)
        together = (c for c in choice.candidates if not c.plan.sync.asynchronous)
        return replace(choice, candidates=tuple(together))

    def probe(self, known: Profile, usual: Mapping[int, float]) -> IdleProbe:
        """Whether what keeps ranks idle has become better; `usual`: see `probe_idle`."""
        world = self.facts.world
        return probe_idle(world, self.plan.devices(world.size), known, usual)

    def move(self, better: Plan, known: Profile, now: float) -> float:
        """Seconds of pause: the most bytes a rank receives, and new programs; now: of a step."""
        world = self.facts.world.size
        before, after = (planned_step(self.facts.partitions, p) for p in (self.plan, better))
        moved = most_received(before, after, world, 1 + known.state_factor)
        steps = 2.0  # that tracing and partitioning for a new plan take; chosen
        return transfer_seconds(moved, world, known) + steps * now
