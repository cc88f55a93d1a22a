"""Memory: plans that need less of it than one that lacks it, and what is said of such a plan.

Plans that save memory are slower than what they are made of, so they are asked for where a quick
plan does not fit. Of a given plan a shortage is a warning (`Shortage`). Where none fits, the
nearest one's is told with changes that would fit (`misfit`), each priced in bytes as plans are."""

from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import ClassVar

from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.planner.candidate import Candidate, has_room, most_lacking
from synchromesh.planner.chain.assemble import SAVINGS, ChainSearch, Saving, levels
from synchromesh.planner.choice import Choice
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.trace.partition.partition import parts_alike
from synchromesh.values.layout import ShardStates
from synchromesh.values.layout_spec import OPTIONS, LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.size import readable


@dataclass(frozen=True)
class SavingSearches:
    """The searches whose plans save in each component what they must, one after another.

    A search adds up what is there when the last component's backward is at work, and knows layouts
    that are mixed roughly. By how much its best plan lacks memory when it is priced exactly, the
    next one must need less; by how much it leaves, the next one may need more:

        limit of its sums   first ABOVE x limit, then sum of the plan before - (its peak - limit)

    They end with the first whose plan lacks memory and is no quicker than one that fits: a plan of
    less memory would be slower still."""

    limit: float  # bytes of a device that plans may use
    left: int = 5  # searches, each with what the one before lacked; chosen, not measured
    lacking: float = 0.0  # bytes above the limit that the best plan of the one before takes

    ABOVE: ClassVar[float] = 1.1  # bytes of mixed layouts were up to 12 % less than the search
    # says (tests/planner/decision/test_memory.py)

    def limit_of_sums(self, before: ChainSearch | None) -> float:
        """Bytes of the next search. before: the one before it, in the process that searches."""
        if self.lacking and before is not None:
            return before.best.memory - self.lacking
        return self.ABOVE * self.limit

    def after(self, best: Candidate, least: float) -> "SavingSearches":
        """What is left after a search found `best`. least: seconds of the quickest that fits."""
        assert best.fullest is not None
        lacking = best.fullest.peak - self.limit
        in_vain = lacking > 0 and best.seconds >= least
        return replace(self, left=0 if in_vain else self.left - 1, lacking=lacking)


def nearest_lacking(candidates: Sequence[Candidate], tried: Collection[Plan]) -> Candidate | None:
    """The quickest that lacks memory, not `tried`, if it may be quicker than all that fit."""
    least = min((c.seconds for c in candidates if c.fits), default=inf)
    short = [c for c in candidates if c.time is not None and not c.fits and c.plan not in tried]
    best = min(short, key=lambda c: c.seconds, default=None)
    if best is None or best.time is None or best.seconds - best.time.update >= least:
        return None
    return best


def ways_to_save(problem: PlanningProblem) -> tuple[Saving, ...]:
    """How a component may save memory: states stay whole where the optimizer needs them so."""
    return tuple(way for way in SAVINGS if way[0] == "none" or not problem.unsplittable)


def savings(partitions: PartitionCache, plan: Plan, profile: Profile) -> list[Plan]:
    """Of the plans that save memory in all components of one that does not fit, those that save
    the least and fit, without and with recomputation; where none of these fits, the leanest. And
    in the fewest micro-batches that fit, if any do."""
    made, rows = [], partitions.problem.rows

    def fitting(plans: Iterable[Plan]) -> Iterator[Plan]:
        return (p for p in plans if has_room(partitions, p, profile, rows))

    for ways in _savings(plan):
        if possible := [p for p in ways if partitions.possible([p])]:
            *others, leanest = possible
            known = others if any(fitting([leanest])) else []
            made.append(next(fitting(known), leanest))
    for ways in _cut(partitions.problem, plan):
        made += islice(fitting(ways), 1)
    return made


def _savings(plan: Plan) -> Iterator[list[Plan]]:
    """Every level of sharding, from the one that saves least, without and with recomputation."""
    for recompute in (False, True):
        made = [_saving(plan, states, recompute) for states in levels(plan.micro_batches)]
        if other := [p for p in dict.fromkeys(made) if p != plan]:
            yield other


def _cut(problem: PlanningProblem, plan: Plan) -> Iterator[list[Plan]]:
    """More micro-batches, as it is and with all states sharded; stages have their own number."""
    if plan.stage_count == 1 and parts_alike(problem.step):
        cut = [*in_micro_batches(problem, plan)]
        sharded = [p for c in cut if (p := _saving(c, "parameters", False)) != c]
        yield from filter(None, (cut, sharded))


def in_micro_batches(problem: PlanningProblem, plan: Plan, most: int = 64) -> Iterator[Plan]:
    """The plan in twice as many micro-batches each time, of a row for each of its ranks at least.
    most: to price 64 of 34 components takes 0.8 s, 50 times as long as one."""
    most = min(most, problem.rows // max(x.data for x in problem.layouts(plan)))
    count, default = 2 * plan.micro_batches, plan.default
    while count <= most:
        if default.name == "pipeline":  # which says their number, too
            default = replace(default, microbatches=count)
        yield replace(plan, default=default, micro_batches=count, pieces=None)
        count *= 2


def _saving(plan: Plan, states: ShardStates, recompute: bool) -> Plan:
    """The plan with all components saving alike, as far as each layout allows it. States are not
    sharded where backwards are divided."""

    def saving(spec: LayoutSpec) -> LayoutSpec:
        if spec.name == "sharded-data":
            spec = LayoutSpec("data")
        level = states if "states" in OPTIONS[spec.name] else "none"
        return replace(spec, states=level, recompute=recompute)

    overrides = tuple(replace(o, spec=saving(o.spec)) for o in plan.overrides)
    schedule = "1f1b" if plan.divides and states != "none" else plan.schedule
    return replace(plan, default=saving(plan.default), overrides=overrides, schedule=schedule)


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
        lacking, rank, memory = most_lacking(candidate.plan, candidate.memory, limits)
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
    """The plan that lacks least, by how much on which device, and changes of it that would fit."""
    problem = partitions.problem
    measured = [c for c in choice.candidates if c.memory]
    if not measured:
        return f"no plan could be priced: {choice.chosen.reason}"

    lacking = [(most_lacking(c.plan, c.memory, problem.limits), c) for c in measured]
    lacking.sort(key=lambda x: x[0][0])
    (lack, rank, memory), nearest = lacking[0]
    limit, room = problem.limits[rank], problem.headroom
    larger = memory.peak * (1 + room.kept / room.usable if room and room.usable else 1)
    changes = [
        _fewer_rows(partitions, nearest.plan, choice.profile),
        _more_micro_batches(partitions, nearest.plan, choice.profile),
        _more_devices(partitions, [c.plan for _, c in lacking], choice.profile),
        f"devices of {readable(larger)} each",
    ]
    unsharded = f". Nothing is sharded: {problem.unsplittable}" if problem.unsplittable else ""
    return (
        f"no plan fits the devices' memory; the nearest of {len(measured)} is "
        f"{str(nearest.plan)!r}, which needs {readable(memory.peak)} on rank {rank}, of which "
        f"{readable(memory.resident)} are there whatever the rows (lacks {readable(lack)}; "
        f"{room or f'it has {readable(limit)}'}). What would fit: "
        f"{', or '.join(filter(None, changes))}{unsharded}"
    )


def _fewer_rows(partitions: PartitionCache, plan: Plan, profile: Profile) -> str:
    """By bisection: what a step needs grows with its rows."""
    rows = partitions.problem.rows
    fewer = range(plan.micro_batches, rows)
    fitting = bisect(fewer, 0, key=lambda n: not has_room(partitions, plan, profile, n))
    return f"a global batch of {fewer[fitting - 1]} rows instead of {rows}" if fitting else ""


def _more_micro_batches(partitions: PartitionCache, plan: Plan, profile: Profile) -> str:
    """The fewest that fit, of twice as many each time."""
    problem = partitions.problem
    if problem.step.coupling:
        return ""  # rows that depend on each other are not parted
    for cut in in_micro_batches(problem, plan):
        if has_room(partitions, cut, profile, problem.rows):
            return f"{cut.micro_batches} micro-batches, {str(cut)!r}"
    return ""


def _more_devices(
    partitions: PartitionCache, plans: Sequence[Plan], profile: Profile, nearest: int = 8,
    times_as_many: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
) -> str:  # fmt: skip
    """The fewest on which one of the `nearest` plans that leave ranks and rows open fits."""
    problem = partitions.problem
    free = [p for p in plans if p.ranks is None and p.rows is None and not p.stages][:nearest]
    for times in times_as_many:
        more = replace(problem, devices=problem.devices * times, limits=problem.limits * times)
        larger = PartitionCache(more)
        for plan in free:
            if has_room(larger, plan, profile, problem.rows):
                return f"{more.devices} devices instead of {problem.devices}, {str(plan)!r}"
    return ""
