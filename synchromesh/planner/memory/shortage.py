"""Whether a plan fits, and what one that does not lacks, where it does most."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from synchromesh.cost.peak_memory import PeakMemory, peak_memories
from synchromesh.planner.candidate import Candidate, planned_step
from synchromesh.planner.problem import PartitionCache
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.size import readable


@dataclass(frozen=True)
class Shortage:
    """What a plan lacks that was given: a clause, and a sentence about what would help."""

    clause: str
    remedy: str

    @classmethod
    def of(
        cls, candidate: Candidate, limits: Sequence[float], rows: int, given: bool = True
    ) -> "Shortage | None":
        """None where it fits, or nothing is known of its memory. given: the plan is the user's."""
        if not candidate.memory or not limits:
            return None
        lacking, rank, memory = most_lacking(candidate, limits)
        if lacking <= 0:
            return None
        limit = limits[rank]
        clause = (
            f"the plan {str(candidate.plan)!r} is predicted to need {readable(memory.peak)} of "
            f"tensors on rank {rank}, which has memory for {readable(limit)}"
        )
        other = "; the plan 'auto' takes one that fits, where there is one" if given else ""
        return cls(clause, _remedy(memory, limit, rows) + other)

    def __str__(self) -> str:
        return f"{self.clause}: the system may end the run. {self.remedy}"


def most_lacking(c: Candidate, limits: Sequence[float]) -> tuple[float, int, PeakMemory]:
    """By how many bytes a candidate exceeds its limit where it does most, on which rank."""
    ranks = c.plan.devices(len(limits))
    missing = [(m.peak - limits[r], r, m) for r, m in zip(ranks, c.memory, strict=True)]
    return max(missing, key=lambda x: x[:2])


def fits(partitions: PartitionCache, plan: Plan, profile: Profile, rows: int) -> bool:
    """Whether `plan` fits with a global batch of so many rows; not where that is not known."""
    problem = partitions.problem
    try:
        placed = replace(planned_step(partitions, plan), rows=rows)
        memory = peak_memories(placed, profile, plan.pieces or 1)
    except ValueError:  # no such plan, or nobody has measured its programs
        return False
    ranks = problem.ranks(plan)
    return all(m.peak <= problem.limits[r] for r, m in zip(ranks, memory, strict=True))


def _remedy(memory: PeakMemory, limit: float, rows: int) -> str:
    """What would help: what a step needs besides what is held grows with its rows."""
    if memory.resident < limit:
        fitting = int(rows * (limit - memory.resident) / (memory.peak - memory.resident))
        if fitting >= 1:
            return (
                f"A global batch of about {fitting} rows instead of {rows} would fit, or devices "
                f"of {readable(memory.peak)} each, or more devices"
            )
    return (
        f"Parameters, gradients and optimizer state alone are {readable(memory.resident)} on a "
        f"device: use more devices, devices of {readable(memory.peak)} each, or an optimizer "
        "with less state"
    )
