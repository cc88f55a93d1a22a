"""A candidate: a plan with what it is predicted to take, and why it was or was not chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from synchromesh.cost.alive_bytes import PeakMemory, copies_bytes
from synchromesh.cost.gradients import compressed_demands
from synchromesh.cost.peak_memory import peak_memories
from synchromesh.cost.planned_step import PlannedStep, Unmeasured
from synchromesh.cost.step_time import StepTime, Walk, best_pieces, step_time
from synchromesh.planner.problem import Demand, PartitionCache, PlanningProblem, served
from synchromesh.values.holding import holdings
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.schedule import PIECES
from synchromesh.values.size import readable
from synchromesh.values.unsupported import refuse_apart


@dataclass(frozen=True)
class Candidate:
    """A plan and its prediction; `time` is None where it could not be priced or run."""

    plan: Plan
    time: StepTime | None
    memory: tuple[PeakMemory, ...]  # of each device that takes part
    fits: bool
    reason: str
    given: bool = False  # by the user, to be compared with what is found

    @property
    def seconds(self) -> float:
        """The predicted step time; infinite where there is none."""
        return self.time.seconds if self.time is not None else float("inf")

    @property
    def fullest(self) -> PeakMemory | None:
        """The memory of the device that needs most; None where nothing is known of it."""
        return max(self.memory, key=lambda m: m.peak, default=None)

    def __str__(self) -> str:
        if self.time is None:
            return self.reason
        takes = (
            f"{self.seconds * 1e3:.2f} ms a step, {readable(max(m.peak for m in self.memory))} on "
            f"a device, {self.time.communication_share:.0%} of the step waiting for traffic"
        )
        return f"{takes}; {self.reason}" if self.reason else takes

    def to_dict(self) -> dict[str, Any]:
        time = self.time
        return {
            "plan": str(self.plan), "step_seconds": None if time is None else time.seconds,
            "memory_bytes": [m.peak for m in self.memory],
            "memory_by_kind": [dict(m.by_kind) for m in self.memory],
            "communication_share": None if time is None else time.communication_share,
            "fits": self.fits, "reason": self.reason, "given": self.given,
            "exact": self.plan.exact,
        }  # fmt: skip

    def to_record(self) -> dict[str, Any]:
        """All of it in JSON, for other ranks; `from_record` reads it."""
        return {
            "plan": str(self.plan), "time": None if self.time is None else asdict(self.time),
            "memory": [asdict(m) for m in self.memory], "fits": self.fits, "reason": self.reason,
        }  # fmt: skip

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Candidate":
        time = record["time"]
        return cls(
            Plan.parse(record["plan"]), None if time is None else StepTime(**time),
            tuple(PeakMemory(**m) for m in record["memory"]), record["fits"], record["reason"],
        )  # fmt: skip


def planned_step(partitions: PartitionCache, plan: Plan) -> PlannedStep:
    """The plan as it would run. ValueError where it allows no partition."""
    problem = partitions.problem
    cut, devices = partitions.partition(plan), len(problem.ranks(plan))
    chain = problem.step.chain
    tensors = {t.name: t for c in chain.components for t in (*c.parameters, *c.buffers)}
    held = holdings(tensors.values(), cut.placements, devices, plan)
    refuse_apart(plan, [local.layout for local in cut.components], held.values())
    return PlannedStep(cut, held, plan, devices, problem.rows, partitions.overlaps(plan))


def demands(partitions: PartitionCache, plan: Plan) -> list[Demand]:
    """Collectives that a plan's servers and compressors ask for, which its partition does not say.
    ValueError where it allows none."""
    asked = [*served(partitions.partition(plan), plan)]
    return (
        [*asked, *compressed_demands(planned_step(partitions, plan))] if plan.compressed else asked
    )


def price(
    partitions: PartitionCache, plan: Plan, profile: Profile, walk: Walk = step_time,
    rows: int | None = None,
) -> Candidate:  # fmt: skip
    """Seconds, bytes on each device, whether it stays below the limits. Where a plan leaves
    pieces open it gets the better number, of those that fit if any does. walk: tells seconds.
    rows: of global batches; None: the problem's, for which it was partitioned."""
    try:
        placed = planned_step(partitions, plan)
        placed = replace(placed, rows=rows or placed.rows)
        if plan.pieces is None or plan.stages:
            time = best_pieces(placed, profile, (PIECES,), walk)
        else:
            time = walk(placed, profile, plan.pieces)
        memory = _memories(partitions.problem, placed, profile, time.pieces)
    except (Unmeasured, ValueError) as error:
        return Candidate(plan, None, (), False, str(error))
    lack = _lack(partitions.problem, plan, memory)
    if lack and plan.pieces is None and time.pieces > 1:
        alone = price(partitions, replace(plan, pieces=1), profile, walk, rows)
        if alone.fits:
            return replace(alone, plan=plan)
    return Candidate(plan, time, memory, not lack, lack)


def _memories(
    problem: PlanningProblem, placed: PlannedStep, profile: Profile, pieces: int
) -> tuple[PeakMemory, ...]:
    """With the copies of an elastic run."""
    memory = peak_memories(placed, profile, pieces)
    if not problem.copying or placed.plan.sync.asynchronous:
        return memory
    ranks = problem.ranks(placed.plan)
    copies = copies_bytes(placed.holdings.values(), profile.state_factor, ranks, problem.copying)
    return tuple(m.beside(copies[rank]) for rank, m in zip(ranks, memory, strict=True))


def most_lacking(
    plan: Plan, memory: Sequence[PeakMemory], limits: Sequence[float]
) -> tuple[float, int, PeakMemory]:
    """By how many bytes a plan exceeds its limit where it does most, on which rank."""
    ranks = plan.devices(len(limits))
    lacking = [(m.peak - limits[r], r, m) for r, m in zip(ranks, memory, strict=True)]
    return max(lacking, key=lambda x: x[:2])


def _lack(problem: PlanningProblem, plan: Plan, memory: Sequence[PeakMemory]) -> str:
    """What the rank lacks that lacks most; nothing where all stay below their limits."""
    if not problem.limits:
        return ""
    most, rank, _ = most_lacking(plan, memory, problem.limits)
    if most <= 0:
        return ""
    kept = problem.headroom.kept if problem.headroom else 0.0
    lacks = f"lacks {readable(most)}" if most > kept else f"takes {readable(most)} of its headroom"
    return f"rank {rank} {lacks}"


def has_room(partitions: PartitionCache, plan: Plan, profile: Profile, rows: int) -> bool:
    """Whether all devices are known to have the memory for a global batch of so many rows."""
    problem = partitions.problem
    try:
        placed = replace(planned_step(partitions, plan), rows=rows)
        memory = _memories(problem, placed, profile, plan.pieces or 1)
    except ValueError:  # no such plan, or nobody has measured its programs
        return False
    return most_lacking(plan, memory, problem.limits)[0] <= 0


def with_pieces(candidate: Candidate, partitions: PartitionCache) -> Candidate:
    """The candidate whose plan says the pieces it was priced with, if several can be."""
    plan = candidate.plan
    if candidate.time is None or plan.stages or not partitions.overlaps(plan):
        return candidate
    return replace(candidate, plan=replace(plan, pieces=candidate.time.pieces))


def other_pieces(candidate: Candidate, partitions: PartitionCache) -> Plan | None:
    """The plan with the other number of pieces, where its rows suffice."""
    plan = candidate.plan
    if plan.pieces is None or candidate.time is None:
        return None
    placed = planned_step(partitions, plan)
    least = min(min(placed.blocks(c.layout)) for c in placed.partition.components)
    other = 1 if plan.pieces > 1 else PIECES
    return replace(plan, pieces=other) if least >= other else None
