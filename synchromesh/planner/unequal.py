"""Further candidates, made of priced ones: rows by what devices can do, and fewer devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from statistics import fmean

from synchromesh.cost.step_time import computing
from synchromesh.planner.candidate import Candidate, planned_step, price
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class WideningTuning:
    """Which further plans are tried; chosen, not measured, where nothing else is said."""

    # Times the quickest's seconds from where devices differ: equal processors of the emulated
    # hosts varied by 30 % from second to second (docs/design.md).
    unequal: float = 1.3
    slowest: float = 2.0  # times the best plan's seconds beyond which a plan is not widened
    shares: int = 64  # shares of rows that the fastest data index has
    plans: int = 2  # plans that are also tried on fewer devices
    device_counts: int = 2  # smaller numbers of devices that are tried


TUNING = WideningTuning()


def widened(
    partitions: PartitionCache, candidates: Sequence[Candidate], profile: Profile
) -> list[Plan]:
    """Plans of candidates: each that may win with rows by speed, the best on fewer devices."""
    problem = partitions.problem
    plans = [p for p in _promising(partitions, candidates, profile) if not p.stages]
    by_speed = filter(None, (shared(partitions, p, profile) for p in plans))
    some = [*by_speed, *fewer(plans, problem.devices, profile)]

    def meaning(plan: Plan) -> tuple[object, ...]:  # on two ranks hybrid:tensor=2 is tensor
        return problem.layouts(plan), tuple(problem.ranks(plan)), plan.rows, plan.pieces

    known = {meaning(c.plan) for c in candidates if c.time is not None}
    new = {meaning(p): p for p in reversed(some)}
    return [p for p in some if new.get(meaning(p)) is p and meaning(p) not in known]


def _promising(
    partitions: PartitionCache, candidates: Sequence[Candidate], profile: Profile
) -> list[Plan]:
    """The plans that are at most `TUNING.slowest` times as slow as the best, that one first; where
    devices are unequal, as if all were quick: what slow ones cost is what rows and ranks mend."""
    known = [c for c in candidates if c.time is not None]
    slowdowns = slowdowns_of(profile, partitions.problem.devices)
    if max(slowdowns) > 1.0:  # slow devices take what the first of the others does
        at = [slowdowns.index(1.0) if slow > 1.0 else r for r, slow in enumerate(slowdowns)]
        slowest = profile.relative_slowdown(set(at))
        even = profile.remade(lambda curves: (curves[r] for r in at), slowest)
        known = [replace(price(partitions, c.plan, even), fits=c.fits) for c in known]
    order = sorted(known, key=lambda c: c.seconds)
    least = next((c.seconds for c in order if c.fits), inf)
    return [c.plan for c in order if c.seconds <= TUNING.slowest * least]


def slowdowns_of(profile: Profile, devices: int) -> tuple[float, ...]:
    """Seconds of each rank for what takes the quickest one; 1 if hardly more, or not known."""
    slowdowns = profile.relative_slowdowns
    if len(slowdowns) != devices:
        return (1.0,) * devices
    return tuple(s if s > TUNING.unequal else 1.0 for s in slowdowns)


@dataclass(frozen=True)
class _RowCost:
    """What a data index takes for n of the rows: fixed + rate n seconds."""

    fixed: float
    rate: float

    def __call__(self, rows: float) -> float:
        return self.fixed + self.rate * rows


def shared(partitions: PartitionCache, plan: Plan, profile: Profile) -> Plan | None:
    """The plan with rows by which every data index computes equally long; None where these hardly
    differ. With f_i seconds whatever the rows and s_i seconds a row,

        f_i + s_i n_i = T      sum of n_i = rows      T = (rows + sum f_i / s_i) / sum 1 / s_i

    An index is as fast as the slowest of its tensor ranks; those that hardly differ from the
    fastest have equal rows. Under `single` and `tensor` there is nothing to share."""
    problem = partitions.problem
    data = _blocks(problem, plan)
    if data == 1 or max(slowdowns_of(profile, problem.devices)) == 1.0:
        return None
    block = problem.rows / data
    costs = _row_costs(partitions, plan, data, profile)
    most = TUNING.unequal * min(p(block) for p in costs)
    quick = [p for p in costs if p(block) <= most]
    if len(quick) == len(costs):
        return None
    usual = _RowCost(fmean(p.fixed for p in quick), fmean(p.rate for p in quick))
    costs = [usual if p(block) <= most else p for p in costs]
    until = problem.rows + sum(p.fixed / p.rate for p in costs)
    until /= sum(1.0 / p.rate for p in costs)
    rows = [max(0.0, (until - p.fixed) / p.rate) for p in costs]
    shares = [max(1, round(TUNING.shares * n / max(rows))) for n in rows]
    return replace(plan, rows=tuple(n // gcd(*shares) for n in shares))


def _blocks(problem: PlanningProblem, plan: Plan) -> int:
    """How many blocks of rows may be given other sizes; 1: the plan says them, or idles ranks."""
    if plan.rows or plan.ranks or len(problem.ranks(plan)) != problem.devices:
        return 1
    return max(x.data for x in problem.layouts(plan))


def _row_costs(
    partitions: PartitionCache, plan: Plan, data: int, profile: Profile
) -> list[_RowCost]:
    """Of each data index: a line through what its slowest rank takes for a block and a quarter."""
    seconds = computing(planned_step(partitions, plan), profile)
    tensor, block = partitions.problem.devices // data, partitions.problem.rows / data
    costs = []
    for i in range(data):
        ranks = range(i * tensor, (i + 1) * tensor)
        full, quarter = (max(seconds(r, share) for r in ranks) for share in (1.0, 0.25))
        rate = max(1e-12, (full - quarter) / (0.75 * block))
        costs.append(_RowCost(max(0.0, full - rate * block), rate))
    return costs


def fewer(plans: Sequence[Plan], devices: int, profile: Profile) -> list[Plan]:
    """The best few of `plans` and `data` on fewer devices, where the links between all of them, or
    slow devices among them, may cost more than they bring; `single` is one more, on the quickest
    device where the first is slow. plans: the best first. The numbers tried are the largest proper
    divisors of all, and that of the quick devices where others are slow. The quickest take part,
    equal ones in their order."""
    slowdowns = slowdowns_of(profile, devices)
    by_speed = sorted(range(devices), key=lambda r: (slowdowns[r], r))
    counts = [k for k in range(devices // 2, 1, -1) if devices % k == 0][: TUNING.device_counts]
    quick = slowdowns.count(1.0)
    variants = []
    for count in dict.fromkeys([quick, *counts]):
        ranks = tuple(sorted(by_speed[:count]))
        if not 1 < count < devices:
            continue
        possible = [p for p in plans if _runs_on(p, count)]
        for plan in (*possible[: TUNING.plans], Plan(LayoutSpec("data"))):
            variants.append(replace(plan, ranks=ranks, rows=None, pieces=None))
    if slowdowns[0] > 1.0:  # of which `single` would be
        variants.append(Plan(LayoutSpec("single"), ranks=(by_speed[0],)))
    return list(dict.fromkeys(variants))


def _runs_on(plan: Plan, count: int) -> bool:
    """Whether every degree of the plan divides so many devices, on which it says nothing else."""
    free = plan.default.name != "single" and plan.ranks is None
    return free and all(count % (w.tensor or 1) == 0 and w.data is None for w in plan.specs)
