"""A shortage: what a plan that does not fit lacks, where it does most, and what would help.

Of a given plan it is a warning (`Shortage`). Where no plan fits, it is the nearest one's, with the
changes of it that would fit (`misfit`): each is priced in bytes as plans are, so that only what
helps is named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from synchromesh.cost.peak_memory import PeakMemory
from synchromesh.planner.candidate import Candidate, fits
from synchromesh.planner.choice import Choice
from synchromesh.planner.memory.saving import in_micro_batches
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


def misfit(choice: Choice, partitions: PartitionCache) -> str:
    """The plan that lacks least, by how much on which device, and what would fit: fewer rows, more
    micro-batches, more devices, larger ones."""
    problem = partitions.problem
    measured = [c for c in choice.candidates if c.memory]
    if not measured:
        return f"no plan could be priced: {choice.chosen.reason}"

    order = sorted(measured, key=lambda c: most_lacking(c, problem.limits)[0])
    nearest, plans = order[0], [c.plan for c in order]
    lacking, rank, memory = most_lacking(nearest, problem.limits)
    limit, room = problem.limits[rank], problem.headroom
    larger = memory.peak * (1 + room.kept / room.usable if room and room.usable else 1)
    changes = [
        _fewer_rows(partitions, nearest.plan, choice.profile),
        _more_micro_batches(partitions, nearest.plan, choice.profile),
        _more_devices(partitions, plans, choice.profile),
        f"devices of {readable(larger)} each",
    ]
    unsharded = f". Nothing is sharded: {problem.unsplittable}" if problem.unsplittable else ""
    return (
        f"no plan fits the devices' memory; the nearest of {len(measured)} is "
        f"{str(nearest.plan)!r}, which needs {readable(memory.peak)} on rank {rank}, of which "
        f"{readable(memory.resident)} are there whatever the rows (lacks {readable(lacking)}; "
        f"{room or f'it has {readable(limit)}'}). What would fit: "
        f"{', or '.join(filter(None, changes))}{unsharded}"
    )


def _fewer_rows(partitions: PartitionCache, plan: Plan, profile: Profile) -> str:
    """By bisection: what a step needs grows with its rows."""
    rows = partitions.problem.rows
    fitting = _last(lambda n: fits(partitions, plan, profile, n), plan.micro_batches, rows)
    return f"a global batch of {fitting} rows instead of {rows}" if fitting else ""


def _last(true: Callable[[int], bool], first: int, end: int) -> int:
    """The last number from `first` on below `end` of which `true` holds, which holds of none
    behind it; 0: of none."""
    if first >= end or not true(first):
        return 0
    while end - first > 1:
        middle = (first + end) // 2
        first, end = (middle, end) if true(middle) else (first, middle)
    return first


def _more_micro_batches(partitions: PartitionCache, plan: Plan, profile: Profile) -> str:
    """The fewest that fit, of twice as many each time."""
    problem = partitions.problem
    if problem.step.coupling:
        return ""  # rows that depend on each other are not parted
    for cut in in_micro_batches(problem, plan):
        if fits(partitions, cut, profile, problem.rows):
            return f"{cut.micro_batches} micro-batches, {str(cut)!r}"
    return ""


def _more_devices(
    partitions: PartitionCache,
    plans: Sequence[Plan],
    profile: Profile,
    nearest: int = 8,
    times_as_many: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
) -> str:
    """The fewest on which one of the `nearest` plans fits. A plan that names ranks says nothing of
    more of them."""
    problem = partitions.problem
    free = [p for p in plans if p.ranks is None and p.rows is None and not p.stages][:nearest]
    for times in times_as_many:
        more = replace(problem, devices=problem.devices * times, limits=problem.limits * times)
        larger = PartitionCache(more)
        for plan in free:
            if fits(larger, plan, profile, problem.rows):
                return f"{more.devices} devices instead of {problem.devices}, {str(plan)!r}"
    return ""
