"""Plans that need less memory than another one: states sharded, activations computed again.

They are slower than what they are made of, so they are asked for where a quick plan does not fit.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import ClassVar

from synchromesh.planner.candidate import Candidate, fits
from synchromesh.planner.chain.assemble import SAVINGS, ChainSearch, Saving
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.trace.partition.partition import parts_alike
from synchromesh.values.layout import ShardStates
from synchromesh.values.layout_spec import OPTIONS, LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class SavingSearches:
    """The searches whose plans save in each component what they must, one after another.

    A search adds up what is there when the last component's backward is at work, and knows layouts
    that are mixed roughly. By how much its best plan lacks memory when it is priced exactly, the
    next one must need less; by how much it leaves, the next one may need more:

        limit of its sums   first ABOVE x limit, then sum of the plan before - (its peak - limit)

    They end with the first whose plan lacks memory and is no quicker than one that fits: one of
    less memory is no quicker."""

    limit: float  # bytes of a device that plans may use
    left: int = 5  # searches, each with what the one before lacked; chosen, not measured
    lacking: float = 0.0  # bytes above the limit that the best plan of the one before takes

    ABOVE: ClassVar[float] = 1.1  # bytes of mixed layouts were up to 12 % less than the search
    # says (tests/planner/memory/test_saving.py)

    def limit_of_sums(self, before: ChainSearch | None) -> float:
        """Bytes of the next search. before: the one before it, in the process that searches."""
        if self.lacking and before is not None:
            return before.found.memory - self.lacking
        return self.ABOVE * self.limit

    def after(self, best: Candidate, least: float) -> "SavingSearches":
        """What is left after a search that found `best`. least: seconds of the quickest candidate
        that fits."""
        assert best.fullest is not None
        lacking = best.fullest.peak - self.limit
        in_vain = lacking > 0 and best.seconds >= least
        return replace(self, left=0 if in_vain else self.left - 1, lacking=lacking)


def nearest_lacking(found: Sequence[Candidate], tried: Collection[Plan]) -> Candidate | None:
    """The quickest candidate that lacks memory and is not among `tried`, if it may be quicker than
    all that fit: sharded states leave less to update."""
    least = min((c.seconds for c in found if c.fits), default=inf)
    short = [c for c in found if c.time is not None and not c.fits and c.plan not in tried]
    best = min(short, key=lambda c: c.seconds, default=None)
    if best is None or best.time is None or best.seconds - best.time.update >= least:
        return None
    return best


def ways_to_save(problem: PlanningProblem) -> tuple[Saving, ...]:
    """In which ways a component may save memory: nothing is sharded where the optimizer needs
    whole parameters."""
    return tuple(way for way in SAVINGS if way[0] == "none" or not problem.unsplittable)


def savings(partitions: PartitionCache, plan: Plan, profile: Profile) -> list[Plan]:
    """Of the plans that save memory in all components of one that does not fit, those that save
    the least and fit, without and with recomputation; where none of these fits, the leanest. And
    in the fewest micro-batches that fit, if any do."""
    made, rows = [], partitions.problem.rows

    def fitting(plans: Iterable[Plan]) -> Iterator[Plan]:
        return (p for p in plans if fits(partitions, p, profile, rows))

    for ways in _savings(plan):
        if possible := [p for p in ways if partitions.possible([p])]:
            *others, leanest = possible
            known = others if any(fitting([leanest])) else []
            made.append(next(fitting(known), leanest))
    for ways in _cut(partitions.problem, plan):
        made += islice(fitting(ways), 1)
    return made


def _savings(plan: Plan) -> Iterator[list[Plan]]:
    """Every level of sharding that frees more than the one before, without and with
    recomputation. Gradients of one micro-batch are sharded when they are there, whatever the
    level."""
    levels: list[ShardStates] = ["none", "optimizer", "parameters"]
    if plan.micro_batches > 1:
        levels.insert(2, "gradients")
    for recompute in (False, True):
        made = [_saving(plan, states, recompute) for states in levels]
        if other := [p for p in dict.fromkeys(made) if p != plan]:
            yield other


def _cut(problem: PlanningProblem, plan: Plan) -> Iterator[list[Plan]]:
    """The plan in more micro-batches, as it is and with all of its states sharded; stages have
    micro-batches of their own."""
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
    """The plan with all components saving alike."""

    def spec(of: LayoutSpec) -> LayoutSpec:
        return _spec(of, states, recompute)

    overrides = tuple(replace(o, spec=spec(o.spec)) for o in plan.overrides)
    return replace(plan, default=spec(plan.default), overrides=overrides)


def _spec(spec: LayoutSpec, states: ShardStates, recompute: bool) -> LayoutSpec:
    """The spec with what its layout allows: states are sharded over data ranks."""
    if spec.name == "sharded-data":
        spec = LayoutSpec("data")
    level = states if "states" in OPTIONS[spec.name] else "none"
    return replace(spec, states=level, recompute=recompute)
