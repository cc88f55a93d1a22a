"""Where no plan fits the devices: the nearest one, what it lacks, and which changes of it fit.

Every change is priced in bytes as plans are, so that only what helps is named."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from synchromesh.planner.choice import Choice
from synchromesh.planner.memory.saving import in_micro_batches
from synchromesh.planner.memory.shortage import fits, most_lacking
from synchromesh.planner.problem import PartitionCache
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.size import readable

MOST_TIMES = 64  # as many devices are looked at,
LOOKED_AT = 8  # under so many of the nearest plans


def misfit(choice: Choice, partitions: PartitionCache) -> str:
    """The plan that lacks least, by how much on which device, and what would fit: fewer rows, more
    micro-batches, more devices, larger ones."""
    problem = partitions.problem
    measured = [c for c in choice.candidates if c.memory]
    if not measured:
        return f"no plan could be priced: {choice.chosen.reason}"

    order = sorted(measured, key=lambda c: most_lacking(c, problem.limits)[0])
    nearest = order[0]
    lacking, rank, memory = most_lacking(nearest, problem.limits)
    limit, room = problem.limits[rank], problem.headroom
    larger = memory.peak * (1 + room.kept / room.usable if room and room.usable else 1)
    changes = [
        _fewer_rows(partitions, nearest.plan, choice.profile),
        _more_micro_batches(partitions, nearest.plan, choice.profile),
        _more_devices(partitions, [c.plan for c in order], choice.profile),
        f"devices of {readable(larger)} each",
    ]
    unsharded = f". Nothing is sharded: {problem.unsplittable}" if problem.unsplittable else ""
    return (
        f"no plan fits the devices' memory; the nearest of {len(measured)} is "
        f"{str(nearest.plan)!r}, which needs {readable(memory.peak)} on rank {rank}, of which "
        f"{readable(memory.resident)} are there whatever the rows (lacks {readable(lacking)}; "
        f"{room or f'it has {readable(limit)}'}). What would fit: "
        f"{', or '.join(c for c in changes if c)}{unsharded}"
    )


def _doubled(most: int, start: int = 2) -> Iterator[int]:
    while start <= most:
        yield start
        start *= 2


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


def _more_devices(partitions: PartitionCache, plans: Sequence[Plan], profile: Profile) -> str:
    """The fewest on which one of the nearest plans fits, of twice as many each time. A plan that
    names ranks says nothing of more of them."""
    problem = partitions.problem
    free = [p for p in plans if p.ranks is None and p.rows is None and not p.stages][:LOOKED_AT]
    for times in _doubled(MOST_TIMES):
        more = replace(problem, devices=problem.devices * times, limits=problem.limits * times)
        larger = PartitionCache(more)
        for plan in free:
            if fits(larger, plan, profile, problem.rows):
                return f"{more.devices} devices instead of {problem.devices}, {str(plan)!r}"
    return ""
