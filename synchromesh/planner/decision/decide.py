"""Deciding a plan: one sequence, whether its facts are measured on live ranks or estimated.

    survey       uniform partitions -> their facts
    propose      searches of the chain and of stages -> their best few, and the plain plans
                 -> facts of new programs -> exact prices
    widen        rows by what devices can do, fewer devices
    ascertain    quick plans whose ranks have more rows than programs were timed with
    save         what lacks memory, sharded or recomputed; the search with these
    simplify     plainer relatives of the best so far
    descend      by exact prices around the best; plainer relatives again
    vary         the best ones with less exact mathematics, where that is allowed
    choose       among all (`choice.decided`)

Where several ranks decide, all call alike and one of them searches and prices for all
(`Facts.agreed`), so that no two can disagree."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil, inf

from synchromesh.cost.planned_step import Unmeasured
from synchromesh.planner.candidate import Candidate, other_pieces, price, with_pieces
from synchromesh.planner.chain.assemble import AS_IS, ChainSearch
from synchromesh.planner.chain.links import crossings
from synchromesh.planner.chain.problem import ChainPlan
from synchromesh.planner.chain.search import runners_up
from synchromesh.planner.choice import Choice, RunnerUp, decided, saves_memory
from synchromesh.planner.decision.descent import descended, neighbours
from synchromesh.planner.decision.memory import (
    SavingSearches,
    nearest_lacking,
    savings,
    ways_to_save,
)
from synchromesh.planner.decision.variants import demanded, variants
from synchromesh.planner.problem import Demand, Facts, PartitionCache, PlanningProblem
from synchromesh.planner.stages.facts import stage_demands
from synchromesh.planner.stages.plans import stage_plans
from synchromesh.planner.unequal import widened
from synchromesh.planner.uniform import MOST_TENSOR, UniformPartitions, degrees, uniform_partitions
from synchromesh.planner.wording import relatives
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


@dataclass(frozen=True)
class DecisionTuning:
    """How far the searches are trusted; chosen, not measured, where nothing else is said."""

    stages: float = 1.3  # times the seconds of the search's best plan, above which plans with
    # stages are neither timed nor priced; exact prices were 0.96 to 1.31 of what their search says
    near: float = 1.15  # times the best plan's seconds: a quicker one whose ranks have many rows
    # is timed with them before it is believed


TUNING = DecisionTuning()


def survey(facts: Facts, known: Profile | None = None) -> Profile:
    """The facts of every tensor degree, of what crosses between them, of what stages send."""
    uniform = uniform_partitions(facts.partitions)
    besides = (*crossings(uniform), *stage_demands(uniform))
    partitions = [*uniform.partitions.values()]
    if uniform.step.coupling:  # which has all devices in each of these
        partitions.append(facts.partitions.partition(Plan(LayoutSpec("single"))))
    return facts.profile(partitions, known, besides=besides)


def decide(
    facts: Facts, profile: Profile, current: Plan | None = None, explained: bool = False,
    given: Sequence[Candidate] = (),
) -> Choice:  # fmt: skip
    """The choice from a survey's profile; what is new in the best plans is asked of `facts`.
    current: the plan in force, which is priced among the candidates. given: candidates of the
    user's. explained: finds each component's runner-up too, in the process that searched. The
    chosen candidate may fit no device (`misfit` says why), or have no price."""
    began = time.perf_counter()
    decision = _Decision(facts, profile)
    usual = current is None or current.usual
    decision.propose(current if usual else None)
    decision.widen()
    decision.ascertain(quick=current is not None)
    decision.save()
    decision.simplify()
    if decision.descend():
        decision.simplify()
    decision.vary([] if usual or current is None else [current])
    candidates = decision.choose(given)
    spent = time.perf_counter() - began - decision.waited
    headroom = facts.partitions.problem.headroom
    choice = Choice(tuple(candidates), decision.profile, spent, headroom=headroom)
    if explained and choice.chosen.fits and decision.search is not None:
        return _with_runners_up(facts.partitions.problem, decision.search, choice)
    return choice


class _Decision:
    """A decision under way: candidates and profile so far, and the search of this process."""

    def __init__(self, facts: Facts, profile: Profile) -> None:
        self.facts, self.partitions, self.profile = facts, facts.partitions, profile
        self.problem = facts.partitions.problem
        self.ways = ways_to_save(self.problem)  # in which a component may save memory
        self.levels = tuple(dict.fromkeys(states for states, _ in self.ways))
        self.search: ChainSearch | None = None
        self.waited = 0.0  # seconds in which partitions were solved and facts made
        self.candidates: list[Candidate] = []
        self.proposed: list[Plan] = []  # plans of the searches and plain ones
        self.wider: list[Plan] = []  # made of these

    def propose(self, current: Plan | None) -> None:
        problem = self.problem

        def find() -> list[Plan]:
            uniform, most = self.uniform, inf
            self.partitions.say("searching")
            try:
                self.search = ChainSearch.of(uniform, self.profile, problem.limit)
                plans = self.search.plans(problem)
                if self.search.best.within:
                    most = TUNING.stages * self.search.best.seconds
            except Unmeasured:  # no layout of a component is known: the plain plans are left
                plans = []
            plans += stage_plans(uniform, problem, self.profile, most)
            plans += plain(problem.devices, splits=not problem.unsplittable)
            plans += [] if current is None else [current]
            return [Plan.parse(text) for text in dict.fromkeys(str(p) for p in plans)]

        self.proposed = self.facts.agreed(find, str, Plan.parse)
        self.ask([p for p in self.proposed if len(problem.ranks(p)) == problem.devices])
        self.candidates = self.priced(self.proposed)

    def widen(self) -> None:
        find = partial(widened, self.partitions, self.candidates, self.profile)
        self.wider = self.facts.agreed(find, str, Plan.parse)
        known = () if self.problem.unsplittable else degrees(self.problem.devices)
        for plan in self.wider:  # numbers of ranks that no layout of all devices has
            if plan.ranks and len(plan.ranks) not in known:
                self.ask([plan], plan.ranks)
        self.candidates += self.priced(self.wider)

    def ascertain(self, quick: bool) -> None:
        """Facts of quick plans with more rows a rank than were timed. quick: need not be exact."""
        problem, sure = self.problem, set[Plan]()
        while near := self._uncertain(sure):
            sure.add(near)
            rows = ceil(problem.rows * _unevenness(near))
            self.ask([near], problem.ranks(near), rows=rows, quick=quick)
            self.candidates = self.priced([*self.proposed, *self.wider])

    def save(self) -> None:
        """Plans that save memory where quick ones lack it: alike in all components, then apart."""
        alike = self._saved_alike()
        if alike is not None:
            self._add([*alike, *self._saved_apart(alike)])

    def simplify(self) -> None:
        """Relatives that are taken instead of the best plan, each plainer than the one before."""
        made = list[Candidate]()
        while (best := decided([*self.candidates, *made])[0]).fits and best.plan.overrides:
            plans = relatives(self.uniform, self.problem, best.plan)
            self.ask(plans, self.problem.ranks(best.plan))
            new = {c.plan: c for c in self.priced(plans)}
            taken = decided([*self.candidates, *made, *new.values()])[0].plan
            if taken not in new:
                break
            made.append(new[taken])
        self._add(made)

    def descend(self) -> bool:
        """What a descent from all candidates finds that is taken instead of the best of them, if
        anything. The rank that searches makes it alone: what is new is estimated, not measured."""
        near = partial(neighbours, self.uniform, self.problem, self.levels)

        def priced(plans: Sequence[Plan]) -> list[Candidate]:
            if self.profile.source != "measured":
                self.ask(plans)
            return [price(self.partitions, plan, self.profile) for plan in plans]

        def find() -> list[Candidate]:
            best = decided(self.candidates)[0]
            made = descended(self.candidates, near, priced, self.problem)
            quicker = [c for c in made if c.fits and not (best.fits and c.seconds >= best.seconds)]
            taken = decided([*self.candidates, *quicker])[0].plan
            return [c for c in quicker if c.plan == taken]

        new = self.facts.agreed(find, Candidate.to_record, Candidate.from_record)
        self.partitions.possible(c.plan for c in new)
        self.candidates += new
        return bool(new)

    def vary(self, current: Sequence[Plan]) -> None:
        """Plans that are allowed besides exact ones, and the one in force if it is such a one."""
        if not self.problem.allowed.kinds:
            return

        def find() -> list[Plan]:
            return list(
                dict.fromkeys((*current, *variants(self.problem, decided(self.candidates))))
            )

        plans = self.facts.agreed(find, str, Plan.parse)
        self.ask(plans, besides=demanded(self.partitions, plans))
        self._add(c for c in self.priced(plans) if c.time is not None or c.plan in current)

    def choose(self, given: Sequence[Candidate]) -> list[Candidate]:
        """All candidates, the chosen one first; of plans on some ranks those that have a price."""
        guessed = [p for p in self.wider if p.ranks is not None]
        made = [c for c in self.candidates if c.time is not None or c.plan not in guessed]
        made = [with_pieces(c, self.partitions) for c in (*made, *given)]
        allowed = self.problem.allowed
        if other := other_pieces(decided(made, allowed)[0], self.partitions):  # adapt/trials.py
            made += self.priced([other])
        every = [*{c.plan: c for c in made}.values(), *refused(self.problem)]
        return decided(every, allowed)

    @cached_property
    def uniform(self) -> UniformPartitions:
        return uniform_partitions(self.partitions)

    def ask(
        self, plans: Sequence[Plan] = (), ranks: Sequence[int] | None = None, rows: int = 0,
        quick: bool = False, others: Iterable[Partition] | None = None,
        besides: Iterable[Demand] = (),
    ) -> None:  # fmt: skip
        """Adds the facts of plans, of `others`, partitions in one micro-batch, and `besides` of
        collectives that these do not say."""
        began = time.perf_counter()
        asked = {} if others is None else {1: [*others]}
        for plan in plans:
            asked.setdefault(plan.micro_batches, []).extend(self.partitions.possible([plan]))
        more = [*besides]
        for parts, possible in asked.items():
            self.profile = self.facts.profile(
                possible, self.profile, ranks, rows=rows, quick=quick, besides=more,
                micro_batches=(parts,),
            )  # fmt: skip
        self.waited += time.perf_counter() - began

    def priced(self, plans: Sequence[Plan]) -> list[Candidate]:
        """The candidates of `plans`, which every rank has partitioned the step for."""
        self.partitions.possible(plans)

        def find() -> Iterator[Candidate]:
            for number, plan in enumerate(plans, 1):
                self.partitions.say(f"pricing plan {number} of {len(plans)}")
                yield price(self.partitions, plan, self.profile)

        return self.facts.agreed(lambda: [*find()], Candidate.to_record, Candidate.from_record)

    def _uncertain(self, sure: Collection[Plan]) -> Plan | None:
        """The quickest that may be best, not `sure`, with more rows a rank than were timed."""
        devices, most = self.problem.devices, self.facts.extrapolation
        fitting = [c for c in self.candidates if c.fits]
        known = [c for c in fitting if c.plan in sure or _largest(c.plan, devices) <= most]
        least = min((c.seconds for c in known), default=inf)
        others = (c for c in fitting if c not in known)
        best = min(others, key=lambda c: c.seconds, default=None)
        return None if best is None or best.seconds > TUNING.near * least else best.plan

    def _add(self, made: Iterable[Candidate]) -> None:
        known = {c.plan for c in self.candidates}
        self.candidates += {c.plan: c for c in made if c.plan not in known}.values()

    def _saved_alike(self) -> list[Candidate] | None:
        """Plans that save alike in all components; None where nothing quick lacks memory."""
        made, tried = list[Candidate](), set[Plan]()
        while near := nearest_lacking([*self.candidates, *made], tried):
            tried.add(near.plan)
            find = partial(savings, self.partitions, near.plan, self.profile)
            less = self.facts.agreed(find, str, Plan.parse)
            tried.update(less)
            for plan in less:
                self.ask([plan], self.problem.ranks(plan))
            made += self.priced(less)
        return made if tried else None

    def _saved_apart(self, alike: Sequence[Candidate]) -> list[Candidate]:
        """The best of each search in which components save what they must."""
        sharded = (
            cut.under([replace(c.layout, shard_states=states) for c in cut.components])
            for states in self.levels[1:]
            for cut in self.uniform.partitions.values()
        )
        self.ask(others=sharded)
        made = [*alike]
        searches = SavingSearches(self.problem.limit)
        while searches.left:
            plans = self.facts.agreed(partial(self._search_saving, searches), str, Plan.parse)
            self.ask(plans)
            new = self.priced(plans)
            if not new or new[0].fullest is None or new[0].plan in {c.plan for c in made}:
                break
            made += new
            fitting = (c.seconds for c in (*self.candidates, *made) if c.fits)
            searches = searches.after(new[0], min(fitting, default=inf))
        return made[len(alike) :]

    def _search_saving(self, searches: SavingSearches) -> list[Plan]:
        limit = searches.limit_of_sums(self.search)
        try:
            self.search = ChainSearch.of(self.uniform, self.profile, limit, self.ways)
        except ValueError:  # a level was not measured, or prices forbid every plan
            return []
        return self.search.plans(self.problem)


def _unevenness(plan: Plan) -> float:
    """The largest share of rows over an equal one."""
    return max(plan.rows) * len(plan.rows) / sum(plan.rows) if plan.rows else 1.0


def _largest(plan: Plan, devices: int) -> float:
    """The most rows of a rank over those of an equal block; 1 of stages, timed with their own."""
    if plan.stages:
        return 1.0
    return _unevenness(plan) * devices / len(plan.devices(devices))


def plain(devices: int, splits: bool = True) -> list[Plan]:
    """What anybody would try: one device, `data`, and with `splits` `tensor` and hybrids."""
    specs = [LayoutSpec("single"), LayoutSpec("data")]
    if splits:
        specs += [LayoutSpec("hybrid", tensor=m) for m in degrees(devices) if 1 < m < devices]
        specs += [LayoutSpec("tensor")] if 1 < devices <= MOST_TENSOR else []
    return [Plan(spec) for spec in specs]


def refused(problem: PlanningProblem) -> list[Candidate]:
    """The plain plans that shard parameters, where the optimizer forbids it; else none."""
    why = problem.unsplittable
    kept = plain(problem.devices, splits=not why)
    return [Candidate(p, None, (), False, why) for p in plain(problem.devices) if p not in kept]


def with_runners_up(partitions: PartitionCache, choice: Choice) -> Choice:
    """The choice with what each component's best other layout would cost, by a search of its own
    in this process; without it where that search fails."""
    problem = partitions.problem
    ways = ways_to_save(problem) if saves_memory(choice.chosen.plan) else AS_IS
    try:
        uniform = uniform_partitions(partitions)
        search = ChainSearch.of(uniform, choice.profile, problem.limit, ways)
        return _with_runners_up(problem, search, choice)
    except ValueError:
        return choice


def _with_runners_up(problem: PlanningProblem, search: ChainSearch, choice: Choice) -> Choice:
    """Runners-up to the chosen plan, or to the search's best where it lacked these layouts."""
    plan = choice.chosen.plan
    options = search.choice(problem, plan)
    if options is None:
        options, plan = search.best.choice, search.plans(problem)[0]
    chain = search.assembled.problem
    chosen = ChainPlan.of(chain, options)
    others = runners_up(chain, chosen, max(search.limit, chosen.memory))
    rows = []
    for i, (name, layout) in enumerate(zip(problem.names, search.layouts(options), strict=True)):
        other = others[i]
        there = None if other is None else search.layouts(other.choice)[i]
        more = None if other is None else other.seconds - chosen.seconds
        rows.append(RunnerUp(name, layout, there, more))
    return replace(choice, components=tuple(rows), components_of=plan)
