"""Deciding a plan: one sequence, whether its facts are measured on live ranks or estimated.

    uniform partitions -> facts -> search -> its best few and the plain plans
                                          -> facts of new programs  -> exact prices
                                          -> unequal rows, fewer devices, priced alike
                         -> search of stages -> its best few, priced alike
                         -> what lacks memory, sharded or recomputed; the search with these
                         -> plainer relatives of the best so far
                         -> descent by exact prices around the best; plainer relatives again
                                          -> the choice among all (`choice.decided`)

Where several ranks decide, all call alike and one of them searches and prices for all
(`Facts.agreed`), so that no two can disagree."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any, Protocol, TypeVar

from synchromesh.cost.step_time import Unmeasured
from synchromesh.planner.candidate import Candidate, other_interleaving, price, with_interleaving
from synchromesh.planner.chain.assemble import AS_IS, crossings
from synchromesh.planner.chain.runner_up import runners_up
from synchromesh.planner.chain.searched import Searched, searched
from synchromesh.planner.chain.walk import found_of
from synchromesh.planner.choice import Choice, RunnerUp, decided, saves_memory
from synchromesh.planner.decision.descent import descended, neighbours
from synchromesh.planner.decision.relatives import relatives
from synchromesh.planner.demand import Demand
from synchromesh.planner.memory.saving import nearest_lacking, savings, ways_to_save
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.stages.facts import stage_demands
from synchromesh.planner.stages.plans import stage_plans
from synchromesh.planner.unequal import widened
from synchromesh.planner.uniform import Uniform, degrees, uniform
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

T = TypeVar("T")
Find = Callable[[], list[T]]
Write = Callable[[T], Any]  # an item as JSON
Read = Callable[[Any], T]  # and back


@dataclass(frozen=True)
class DecisionTuning:
    """How far the searches are trusted; chosen, not measured, where nothing else is said."""

    stages: float = 1.3  # times the seconds of the search's best plan, above which plans with
    # stages are neither timed nor priced; exact prices were 0.96 to 1.31 of what their search says
    above: float = 1.1  # times the limit, with which these begin: bytes of mixed layouts were up
    # to 12 % less than the search says (tests/planner/memory/test_saving.py)
    searches: int = 5  # for plans that save memory, each with what the one before lacked
    near: float = 1.15  # times the best plan's seconds: a quicker one whose ranks have many rows
    # is timed with them before it is believed


TUNING = DecisionTuning()


class Facts(Protocol):
    """What deciding asks for: live ranks measure it, data sheets estimate it."""

    @property
    def extrapolation(self) -> float:
        """Times the rows of an equal block up to which what is known of a program holds."""
        ...

    def profile(
        self,
        partitions: Iterable[Partition],
        known: Profile | None,
        ranks: Sequence[int] | None = None,
        *,
        rows: int = 0,
        quick: bool = False,
        besides: Iterable[Demand] = (),
        micro_batches: Collection[int] = (1,),
    ) -> Profile:
        """The facts of `partitions` on `ranks` (None: all) with what `known` has besides.

        rows: of a global batch (0: those of the problem). quick: what is known already need not
        be exact. besides: further collectives that may be asked for. micro_batches: into how many
        a plan may cut a global batch."""
        ...

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        """What one of the ranks finds, on all of them; where it fails, on all."""
        ...


def survey(partitions: PartitionCache, facts: Facts, known: Profile | None = None) -> Profile:
    """The facts that searches need: of every tensor degree, of what crosses between them, and of
    what groups of stages send."""
    parts = uniform(partitions)
    besides = (*crossings(parts), *stage_demands(parts))
    all_parts = [*parts.partitions.values()]
    if parts.step.coupling:  # which has all devices in each of these
        all_parts.append(partitions.partition(Plan(LayoutSpec("single"))))
    return facts.profile(all_parts, known, besides=besides)


def decide(
    partitions: PartitionCache,
    facts: Facts,
    profile: Profile,
    current: Plan | None = None,
    explained: bool = False,
    given: Sequence[Candidate] = (),
) -> Choice:
    """The choice from a survey's profile; what is new in the best plans is asked of `facts`.

    current: the plan in force, which is priced among the candidates. given: candidates of the
    user's. explained: finds each component's runner-up too, in the process that searched. The
    chosen candidate may fit no device (`misfit.py` says why), or have no price."""
    problem = partitions.problem
    began = time.perf_counter()
    deciding = _Deciding(partitions, facts, profile)
    plans = deciding.proposed(current)
    deciding.ask([p for p in plans if len(problem.ranks(p)) == problem.devices])
    found = deciding.priced(plans)
    more = facts.agreed(lambda: widened(partitions, found, deciding.profile), str, Plan.parse)
    for plan in more:  # numbers of ranks that no layout of all devices has
        if plan.ranks and (problem.unsplittable or problem.devices % len(plan.ranks)):
            deciding.ask([plan], plan.ranks)
    found += deciding.priced(more)
    sure: set[Plan] = set()
    while near := _uncertain(found, problem.devices, facts.extrapolation, sure):
        # its ranks have more rows than a program was timed with: no guess where it counts
        sure.add(near)
        rows, quick = ceil(problem.rows * _unevenness(near)), current is not None
        deciding.ask([near], problem.ranks(near), rows=rows, quick=quick)
        found = deciding.priced([*plans, *more])
    found += deciding.saving(found)
    found += deciding.plainer(found)
    if better := deciding.better(found):
        found += better
        found += deciding.plainer(found)
    guessed = [p for p in more if p.ranks is not None]
    found = [c for c in found if c.time is not None or c.plan not in guessed]
    found = [with_interleaving(c, partitions) for c in (*found, *given)]
    if other := other_interleaving(decided(found)[0], partitions):  # for adapt/trials.py
        found += deciding.priced([other])
    found = decided([*{c.plan: c for c in found}.values(), *refused(problem)])
    spent = time.perf_counter() - began - deciding.waited
    choice = Choice(tuple(found), deciding.profile, spent, headroom=problem.headroom)
    if explained and found[0].fits and deciding.search is not None:
        return _with_runners_up(problem, deciding.search, choice)
    return choice


class _Deciding:
    """A decision under way: the profile so far, and the search of this process if it made one."""

    def __init__(self, partitions: PartitionCache, facts: Facts, profile: Profile) -> None:
        self.partitions, self.facts, self.profile = partitions, facts, profile
        self.ways = ways_to_save(partitions.problem)  # in which a component may save memory
        self.levels = tuple(dict.fromkeys(states for states, _ in self.ways))
        self.search: Searched | None = None
        self.waited = 0.0  # seconds in which partitions were solved and facts made

    def ask(
        self,
        plans: Sequence[Plan],
        ranks: Sequence[int] | None = None,
        rows: int = 0,
        quick: bool = False,
    ) -> None:
        """Adds the facts of plans to the profile."""
        began = time.perf_counter()
        for parts in dict.fromkeys(plan.micro_batches for plan in plans):
            possible = self.partitions.possible(p for p in plans if p.micro_batches == parts)
            self.profile = self.facts.profile(
                possible, self.profile, ranks, rows=rows, quick=quick, micro_batches=(parts,)
            )
        self.waited += time.perf_counter() - began

    def proposed(self, current: Plan | None) -> list[Plan]:
        """The best of the searches, the plain plans and the one in force."""
        problem = self.partitions.problem

        def propose() -> list[Plan]:
            parts, most = uniform(self.partitions), inf
            self.partitions.say("searching")
            try:
                self.search = searched(parts, self.profile, problem.limit)
                found = self.search.plans(problem)
                if self.search.found.fits:
                    most = TUNING.stages * self.search.found.seconds
            except Unmeasured:  # no layout of a component is known: the plain plans are left
                found = []
            found += stage_plans(parts, problem, self.profile, most)
            known = plain(problem.devices, splits=not problem.unsplittable)
            plans = [*found, *known, *([] if current is None else [current])]
            return [Plan.parse(text) for text in dict.fromkeys(str(p) for p in plans)]

        return self.facts.agreed(propose, str, Plan.parse)

    def saving(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Plans that save memory, where quick ones in `found` lack it: those that save alike in
        all components, and the best of the search that saves in each component what it must.

        The search adds up what is there when the last component's backward is at work, and knows
        layouts that are mixed roughly. By how much its best plan lacks memory when it is priced
        exactly, the next one must need less; by how much it leaves, the next one may need more."""
        problem, made = self.partitions.problem, list[Candidate]()
        tried: set[Plan] = set()
        while near := nearest_lacking([*found, *made], tried):
            tried.add(near.plan)
            find = partial(savings, self.partitions, near.plan, self.profile)
            less = self.facts.agreed(find, str, Plan.parse)
            tried.update(less)
            for plan in less:
                self.ask([plan], problem.ranks(plan))
            made += self.priced(less)
        if not tried:
            return []
        parts, lacking = uniform(self.partitions), 0.0
        self._ask_of_levels(parts)
        for _ in range(TUNING.searches):
            find = partial(self._saved, parts, lacking)
            plans = self.facts.agreed(find, str, Plan.parse)
            self.ask(plans)
            new = self.priced(plans)
            if not new or new[0].fullest is None or new[0].plan in {c.plan for c in made}:
                break
            made += new
            lacking = new[0].fullest.peak - problem.limit
            least = min((c.seconds for c in (*found, *made) if c.fits), default=inf)
            if lacking > 0 and new[0].seconds >= least:  # one of less memory is no quicker
                break
        known = {c.plan for c in found}
        return list({c.plan: c for c in made if c.plan not in known}.values())

    def plainer(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Relatives of the plan that would be taken that are taken instead, each plainer than the
        one before."""
        made, parts = list[Candidate](), uniform(self.partitions)
        while (best := decided([*found, *made])[0]).fits and best.plan.overrides:
            plans = relatives(parts, self.partitions.problem, best.plan)
            self.ask(plans, self.partitions.problem.ranks(best.plan))
            new = {c.plan: c for c in self.priced(plans)}
            taken = decided([*found, *made, *new.values()])[0].plan
            if taken not in new:
                break
            made.append(new[taken])
        return [c for c in made if c.plan not in {known.plan for known in found}]

    def better(self, found: Sequence[Candidate]) -> list[Candidate]:
        """What is taken instead of the best of `found` after a descent from these. The rank that
        searches makes it alone: what is new there is estimated, but not measured."""
        problem = self.partitions.problem
        near = partial(neighbours, uniform(self.partitions), problem, self.levels)

        def priced(plans: Sequence[Plan]) -> list[Candidate]:
            if self.profile.source != "measured":
                self.ask(plans)
            return [price(self.partitions, plan, self.profile) for plan in plans]

        def find() -> list[Candidate]:
            best = decided(found)[0]
            made = descended(found, near, priced, problem)
            quicker = [c for c in made if c.fits and not (best.fits and c.seconds >= best.seconds)]
            taken = decided([*found, *quicker])[0].plan
            return [c for c in quicker if c.plan == taken]

        new = self.facts.agreed(find, Candidate.to_record, Candidate.from_record)
        self.partitions.possible(c.plan for c in new)
        return new

    def _ask_of_levels(self, parts: Uniform) -> None:
        """The facts of every degree under every level of sharded states."""
        began = time.perf_counter()
        every = [
            cut.under([replace(c.layout, shard_states=states) for c in cut.components])
            for states in self.levels[1:]
            for cut in parts.partitions.values()
        ]
        self.profile = self.facts.profile(every, self.profile)
        self.waited += time.perf_counter() - began

    def _saved(self, parts: Uniform, lacking: float) -> list[Plan]:
        """The best of the search in which components may save memory; with as much less, or more,
        than in the plan that it found before as that lacks, or leaves."""
        limit, before = TUNING.above * self.partitions.problem.limit, self.search
        if lacking and before is not None:
            limit = before.found.memory - lacking
        try:
            self.search = searched(parts, self.profile, limit, self.ways)
        except ValueError:  # a level was not measured, or prices forbid every plan
            return []
        return self.search.plans(self.partitions.problem)

    def priced(self, plans: Sequence[Plan]) -> list[Candidate]:
        """The candidates of `plans`, which every rank has partitioned the step for."""
        self.partitions.possible(plans)

        def find() -> Iterator[Candidate]:
            for number, plan in enumerate(plans, 1):
                self.partitions.say(f"pricing plan {number} of {len(plans)}")
                yield price(self.partitions, plan, self.profile)

        return self.facts.agreed(lambda: [*find()], Candidate.to_record, Candidate.from_record)


def _uncertain(
    found: Sequence[Candidate], devices: int, extrapolation: float, sure: Collection[Plan]
) -> Plan | None:
    """Of the plans whose ranks have more rows than programs were timed with, and that are not in
    `sure`, the quickest, if it may be the best of all."""
    known = [c for c in found if _largest(c.plan, devices) <= extrapolation or c.plan in sure]
    guessed = [c for c in found if c.fits and c not in known]
    best = min(guessed, key=lambda c: c.seconds, default=None)
    least = min((c.seconds for c in known if c.fits), default=float("inf"))
    return None if best is None or best.seconds > TUNING.near * least else best.plan


def _unevenness(plan: Plan) -> float:
    """The largest share of rows over an equal one."""
    return max(plan.rows) * len(plan.rows) / sum(plan.rows) if plan.rows else 1.0


def _largest(plan: Plan, devices: int) -> float:
    """The most rows of a rank over those of an equal block on all devices; programs of stages are
    timed with their own."""
    if plan.stages:
        return 1.0
    return _unevenness(plan) * devices / len(plan.devices(devices))


# Plans that are proposed


def plain(devices: int, splits: bool = True) -> list[Plan]:
    """The plans that anybody would try: one device, `data`, and where parameters may be sharded
    `tensor` and uniform hybrids."""
    specs = [LayoutSpec("single"), LayoutSpec("data")]
    if splits:
        specs += [LayoutSpec("hybrid", tensor=m) for m in degrees(devices) if 1 < m < devices]
        specs += [LayoutSpec("tensor")] if devices > 1 else []
    return [Plan(spec) for spec in specs]


def refused(problem: PlanningProblem) -> list[Candidate]:
    """The plain plans that shard parameters, where the optimizer forbids it; else none."""
    why = problem.unsplittable
    kept = plain(problem.devices, splits=not why)
    return [Candidate(p, None, (), False, why) for p in plain(problem.devices) if p not in kept]


# Runners-up


def with_runners_up(partitions: PartitionCache, choice: Choice) -> Choice:
    """The choice with what each component's best other layout would cost, by a search of its own
    in this process; without it where that search fails."""
    problem = partitions.problem
    try:
        ways = ways_to_save(problem) if saves_memory(choice.chosen.plan) else AS_IS
        result = searched(uniform(partitions), choice.profile, problem.limit, ways)
        return _with_runners_up(problem, result, choice)
    except ValueError:
        return choice


def _with_runners_up(problem: PlanningProblem, result: Searched, made: Choice) -> Choice:
    """Runners-up to the chosen plan; to the search's own best one where the search was not
    offered the chosen one's layouts."""
    plan = made.chosen.plan
    choice = result.choice(problem, plan)
    if choice is None:
        choice, plan = result.found.choice, result.plans(problem)[0]
    chosen = found_of(result.assembled.problem, choice)
    others = runners_up(result.assembled.problem, chosen, max(result.limit, chosen.memory))
    rows = []
    for i, (name, layout) in enumerate(zip(problem.names, result.layouts(choice), strict=True)):
        other = others[i]
        there = None if other is None else result.layouts(other.choice)[i]
        more = None if other is None else other.seconds - chosen.seconds
        rows.append(RunnerUp(name, layout, there, more))
    return replace(made, components=tuple(rows), components_of=plan)
