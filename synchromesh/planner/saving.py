"""Plans that need less memory than another one: states sharded, activations computed again.

They are slower than what they are made of, so they are asked for where a quick plan does not fit.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from math import inf

from synchromesh.planner.assemble import SAVINGS, Saving
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.planning_problem import PartitionCache, PlanningProblem
from synchromesh.planner.shortage import fits
from synchromesh.values.layout import ShardStates
from synchromesh.values.layout_spec import OPTIONS, LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


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
    the least and fit, without and with recomputation; where none of these fits, the leanest."""
    made, rows = [], partitions.problem.rows
    for ways in _savings(plan):
        if possible := [p for p in ways if partitions.possible([p])]:
            *others, leanest = possible
            known = others if fits(partitions, leanest, profile, rows) else []
            made.append(next((p for p in known if fits(partitions, p, profile, rows)), leanest))
    return made


def _savings(plan: Plan) -> Iterator[list[Plan]]:
    """Every level of sharding that frees more than the one before, without and with
    recomputation. Gradients of one micro-batch are sharded when they are there, whatever the
    level."""
    levels: list[ShardStates] = ["none", "optimizer", "parameters"]
    if plan.micro_batches > 1:
        levels.insert(2, "gradients")
    for recompute in (False, True):
        made = [
            replace(
                plan,
                default=_spec(plan.default, states, recompute),
                overrides=tuple(
                    replace(o, spec=_spec(o.spec, states, recompute)) for o in plan.overrides
                ),
            )
            for states in levels
        ]
        if other := [p for p in dict.fromkeys(made) if p != plan]:
            yield other


def _spec(spec: LayoutSpec, states: ShardStates, recompute: bool) -> LayoutSpec:
    """The spec with what its layout allows: states are sharded over data ranks."""
    if spec.name == "sharded-data":
        spec = LayoutSpec("data")
    level = states if "states" in OPTIONS[spec.name] else "none"
    return replace(spec, states=level, recompute=recompute)
