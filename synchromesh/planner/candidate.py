"""A candidate: a plan with what it is predicted to take, and why it was or was not chosen."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from synchromesh.cost.peak_memory import PeakMemory, peak_memories
from synchromesh.cost.step_time import Setting, StepTime, Unmeasured, best_interleaving, step_time
from synchromesh.trace.partition.partition import Partition, overlaps, partition
from synchromesh.trace.step import Step
from synchromesh.values.holding import holdings
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.schedule import INTERLEAVED


@dataclass(frozen=True)
class Model:
    """What is planned for: a traced step, module paths inside components, rows of a batch."""

    step: Step
    rows: int
    inside: Mapping[str, Sequence[str]]
    _made: dict[tuple[Layout, ...], Partition] = field(default_factory=dict, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return self.step.chain.names

    def partition(self, plan: Plan, world: int) -> Partition:
        """The partition under `plan`, solved once."""
        layouts = plan.layouts(self.names, world, self.inside)
        if layouts not in self._made:
            self._made[layouts] = partition(self.step, layouts, rows=self.rows)
        return self._made[layouts]

    def possible(self, plans: Iterable[Plan], world: int) -> list[Partition]:
        """The partitions under the plans that allow one; `price` says of the rest why not."""
        made = []
        for plan in plans:
            with suppress(ValueError):
                made.append(self.partition(plan, world))
        return made

    def known(self, plan: Plan, world: int) -> Partition | None:
        """The partition under `plan`, if it has been solved."""
        return self._made.get(plan.layouts(self.names, world, self.inside))


@dataclass(frozen=True)
class Candidate:
    """A plan and its prediction; `time` is None where it could not be priced or run."""

    plan: Plan
    time: StepTime | None
    memory: tuple[PeakMemory, ...]  # of each device that takes part
    fits: bool
    reason: str

    @property
    def seconds(self) -> float:
        return self.time.seconds if self.time is not None else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; its keys are interface."""
        time = self.time
        return {
            "plan": str(self.plan),
            "step_seconds": None if time is None else time.seconds,
            "memory_bytes": [m.peak for m in self.memory],
            "communication_share": None if time is None else time.communication_share,
            "fits": self.fits,
            "reason": self.reason,
        }


def setting(model: Model, plan: Plan, made: Partition, world: int) -> Setting:
    """The plan as it would run on `world` ranks."""
    devices = len(plan.devices(world))
    chain = model.step.chain
    tensors = {t.name: t for c in chain.components for t in (*c.parameters, *c.buffers)}
    held = holdings(tensors.values(), made.placements, devices)
    return Setting(made, held, plan, devices, model.rows, overlaps(model.step, made))


def price(
    model: Model, plan: Plan, world: int, profile: Profile, limits: Sequence[float] = ()
) -> Candidate:
    """The candidate of `plan`: seconds, bytes on each device, whether it stays below `limits`.

    limits: bytes of each rank; none: no limit. A plan that leaves open in how many pieces rows
    walk gets the better number.
    """
    try:
        placed = setting(model, plan, model.partition(plan, world), world)
        if plan.pieces is None:
            time = best_interleaving(placed, profile, (INTERLEAVED,))
        else:
            time = step_time(placed, profile, plan.pieces)
        memory = peak_memories(placed, profile, time.interleaved)
    except (Unmeasured, ValueError) as error:
        return Candidate(plan, None, (), False, str(error))
    over = [
        (m.peak - limits[rank], rank)
        for rank, m in zip(plan.devices(world), memory, strict=True)
        if limits and m.peak > limits[rank]
    ]
    if over:
        most, rank = max(over)
        reason = f"rank {rank} lacks {readable(most)}"
        return Candidate(plan, time, memory, False, reason)
    return Candidate(plan, time, memory, True, "")


def with_pieces(candidate: Candidate, possible: bool) -> Candidate:
    """The candidate with the number of pieces it was priced with written into its plan."""
    if candidate.time is None or not possible:
        return candidate
    return replace(candidate, plan=replace(candidate.plan, pieces=candidate.time.interleaved))


def readable(size: float) -> str:
    """Bytes for a reader: 3.2 GB."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
