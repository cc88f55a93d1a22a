"""The memory of this rank: what plans may use, and what is said and done where it is short."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from synchromesh.cost.alive_bytes import PeakMemory, held_bytes
from synchromesh.engine import heap
from synchromesh.engine.world import World
from synchromesh.launcher.machine import Machine, machine_of
from synchromesh.launcher.rank import report_shortage
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.decision.memory import Shortage
from synchromesh.planner.problem import Headroom, Say
from synchromesh.programs.memory import process_bytes, storage_bytes, transient_bytes
from synchromesh.programs.model import Model
from synchromesh.programs.optimizer import state_factor, states_of
from synchromesh.values.caution import caution
from synchromesh.values.holding import Holding
from synchromesh.values.plan import Plan


@dataclass(frozen=True)
class MemoryTuning:
    """When memory is looked at and taken for short; chosen, where nothing else is said."""

    plenty: float = 8  # a model that takes a smaller part of a device fits with any optimizer
    # Bytes of a process for one of tensors, at most, where freed blocks stay on the heap: of an
    # MLP with 4,096 rows under `tensor`; 2.8 of GPT-2 with 100 M parameters under `sharded-data`.
    holes: float = 3.3
    seldom: int = 8  # steps, until memory has been short; looking takes 20 to 45 us of a step
    short: float = 0.75  # of the memory that a rank may use; more is short


TUNING = MemoryTuning()


class RankMemory:
    """limits: bytes that each rank may hold, from `limit` on; headrooms: what plans leave."""

    def __init__(
        self, model: Model, optimizer: Optimizer, world: World, headroom: str | None, say: Say
    ) -> None:
        self.model, self.optimizer, self.world, self.say = model, optimizer, world, say
        self.limits: tuple[float, ...] = ()
        self.headrooms: list[Headroom] = []
        self._asked, self._mine = headroom, 0
        self._share = memory_share(world)
        self._short = False  # whether this process has ever taken most of it
        self._warned: Plan | None = None

    def free_bytes(self) -> int:
        return free_bytes(self._share, self.world.device)

    def room(self) -> int:
        """Bytes that training so far has left free at its fullest."""
        free = self.free_bytes()
        return free - (transient_bytes() if self.world.device.type == "cpu" else 0)

    def limit(self) -> None:
        """Notes what memory there is, while this process has no tensors but the model's and its
        optimizer's: others count as what planning may not use. All ranks call alike."""
        states = states_of(self.optimizer)
        present = [*self.model.parameters.values(), *self.model.buffers.values(), *states]
        self._mine = self.free_bytes() + storage_bytes(x for x in present if not x.is_meta)
        self.share_limits()

    def share_anew(self) -> None:
        """Ranks are others than before, and so are their parts of a device; all call alike."""
        before, self._share = self._share, memory_share(self.world)
        self._mine += self._share - before
        self.share_limits()

    def share_limits(self) -> None:
        """Ranks tell what each may hold; all call alike."""
        self.limits = tuple(map(float, self.world.everyone.all_gather_json(self._mine)))
        reserve = Headroom.RESERVE if self.world.device.type == "cpu" else 0
        self.headrooms = [Headroom.of(n, self._asked, reserve=reserve) for n in self.limits]

    def relieve(self, steps: int) -> None:
        """After so many steps: where this process has taken most of its memory, large tensors come
        without holes from now on, and the heap gives back what is free (`engine/heap.py`)."""
        if self.world.device.type != "cpu" or (not self._short and steps % TUNING.seldom):
            return
        if process_bytes() > TUNING.short * self._share:
            self._short = True
            heap.keep_small()
            heap.release()

    def held(self, plan: Plan, holdings: Mapping[str, Holding]) -> Candidate:
        """A plan with what parameters, gradients and optimizer state alone take."""
        ranks = plan.devices(self.world.size)
        held = [
            [h for h in holdings.values() if p in h.positions and (h.replica or h.kept_at(p))]
            for p in range(len(ranks))
        ]
        least = [sum(held_bytes(h, 0.0, ()).values()) for h in held]
        limits = [self.limits[r] for r in ranks]
        tight = any(TUNING.plenty * n > limit for n, limit in zip(least, limits, strict=True))
        factor = 0.0  # bytes of optimizer state for a byte of a parameter
        if tight:
            with suppress(Exception):  # of the user's optimizer, whose own step will say it
                dtypes = [p.dtype for g in self.optimizer.param_groups for p in g["params"]]
                factor = state_factor(self.optimizer, self.world.device, dtypes[0])
        bytes_ = [round(sum(held_bytes(h, factor, h).values())) for h in held]
        return Candidate(plan, None, tuple(PeakMemory(n, n) for n in bytes_), True, "")

    def warn_of_shortage(self, candidate: Candidate, rows: int, given: bool) -> None:
        """Says once of a plan that it will not fit, and leaves that for the launcher; where it
        comes near to that, large tensors come without holes. given: the plan is the user's."""
        most = max((m.peak for m in candidate.memory), default=0)
        if self.world.device.type == "cpu" and TUNING.holes * most > min(self.limits):
            heap.keep_small()
        if self.world.rank:
            return
        shortage = Shortage.of(candidate, self.limits, rows, given)
        report_shortage(shortage.clause if shortage else "")
        if shortage is None:
            if candidate.memory and not candidate.fits:
                self.say(f"the plan {str(candidate.plan)!r} fits, but {candidate.reason}")
        elif self._warned != candidate.plan:
            self._warned = candidate.plan
            caution(str(shortage))


def memory_share(world: World) -> int:
    """Bytes of its device that each rank may use: a host's are divided. All ranks call alike."""
    mine = machine_of(world.rank, world.device)
    machines = [Machine.from_dict(m) for m in world.everyone.all_gather_json(mine.to_dict())]
    return mine.memory_bytes // mine.sharers(machines)


def free_bytes(share: int, device: torch.device) -> int:
    """What is left of `share` bytes, once what was freed is given back to the system."""
    if device.type == "cuda":
        return share - torch.cuda.memory_allocated(device)
    heap.release()
    return max(0, share - process_bytes())
