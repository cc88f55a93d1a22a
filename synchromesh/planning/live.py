"""Planning on the ranks of this run: facts are measured, or sampled where an earlier run has kept
them (`profiling/profile_cache.py`). All ranks call alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from synchromesh.cost.step_time import Walk, step_time
from synchromesh.engine import batches, heap
from synchromesh.engine.world import World
from synchromesh.planner.candidate import Candidate
from synchromesh.planner.choice import Choice
from synchromesh.planner.decision.decide import with_runners_up
from synchromesh.planner.problem import PartitionCache, Say, silent
from synchromesh.planner.stages.cuts import cut_plan
from synchromesh.planner.uniform import uniform_partitions
from synchromesh.planning.other_ranks import Before, OtherRanks, Prepared, likely, plain
from synchromesh.planning.rank_memory import RankMemory
from synchromesh.planning.session import PlanningSession, parsed, quickest
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_cache import ProfileCache
from synchromesh.programs.model import Model
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.allowance import NOTHING, Allowance
from synchromesh.values.caution import caution
from synchromesh.values.fault import message
from synchromesh.values.holding import Holding
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile


class LiveSession(PlanningSession):
    """A planning session whose facts these ranks measure. say: is told, on every rank, what is
    measured and what is reused. Without facts to begin with, those that are kept are used."""

    facts: LiveFacts

    def __init__(self, facts: LiveFacts, say: Say = silent) -> None:
        super().__init__(facts)
        self.say = say

    def best(self) -> Choice:
        """The plan that is chosen of those that fit every device. ValueError where none does."""
        world, step = self.facts.world, self.problem.step
        if world.size == 1:
            return Choice.only(Plan(LayoutSpec("single")), "one device", Profile(1))
        if step.opaque:
            return Choice.untraced(step, Profile(world.size))
        cache = ProfileCache.open(self.facts, range(world.size))
        known = cache.profile(uniform_partitions(self.partitions).partitions.values(), self.say)
        if known is None:
            count = len(step.chain.components)
            self.say(f"measuring {count} components on {world.size} ranks ...")
        choice = self.reconsider(self.survey(known))
        cache.keep(choice.profile, known)
        heap.release()  # training begins with the memory that measuring has taken
        spent = choice.profile.seconds
        self.say(f"measured for {spent:.1f} s, searched for {choice.planning_seconds:.1f} s")
        self._say_missing(choice.profile)
        return choice

    def reconsider(self, known: Profile, current: Plan | None = None) -> Choice:
        """The choice from known facts; what is new in the best plans is measured. ValueError where
        no plan fits. current: the plan in force, which is priced among the candidates."""
        choice = self.choose(known, current)
        if all(c.time is None for c in choice.candidates):
            return self._unpriced(choice)
        if refusal := self.refusal(choice):
            raise ValueError(refusal)
        return choice

    def _unpriced(self, choice: Choice) -> Choice:
        """`data` where nothing is known of any plan: training warns, it does not fail for it."""
        reason = choice.chosen.reason or "nothing could be measured"
        if self.facts.world.rank == 0:
            missing = "; ".join(choice.profile.missing[:2])
            caution(f"no plan could be predicted, so it is `data` ({reason}; {missing})")
        return Choice.only(Plan(LayoutSpec("data")), reason, choice.profile)

    def cut(self, plan: Plan, known: Profile | None) -> Plan:
        if plan.stage_count > len(self.problem.names):
            return cut_plan(self.problem.step, plan, (), self.problem.devices)  # says so
        if known is None:
            self.say(f"measuring {len(self.problem.names)} components to cut them into stages ...")
        made = super().cut(plan, known)
        self.say(f"cut into stages that begin with {', '.join(s.first for s in made.stages)}")
        return made

    def predict(
        self, plan: Plan, known: Profile | None, walk: Walk = step_time
    ) -> tuple[Candidate, Profile]:
        if self.problem.step.opaque:
            reason = "the model runs whole: nothing was measured"
            nothing = known or Profile(self.problem.devices)
            return Candidate(plan, None, (), True, reason), nothing
        return super().predict(plan, known, walk)

    def profile(self, plan: Plan, known: Profile | None, micro_batches: int) -> Profile:
        """What is measured besides `known`, which is of this run, is not kept for other runs."""
        if known is not None:
            return super().profile(plan, known, micro_batches)

        def likely() -> Iterator[Partition]:
            yield self.partitions.partition(plan)
            yield from uniform_partitions(self.partitions).partitions.values()  # as `auto` needs

        cache = ProfileCache.open(self.facts, self.problem.ranks(plan))
        kept = cache.profile(likely(), self.say)
        profile = super().profile(plan, kept, micro_batches)
        cache.keep(profile, kept)
        heap.release()
        self.say(f"measured for {profile.seconds:.1f} s")
        self._say_missing(profile)
        return profile

    def _say_missing(self, profile: Profile, shown: int = 3) -> None:
        """What could not be measured: plans that need it are priced without it, or not at all."""
        if profile.missing:
            more = len(profile.missing) - shown
            rest = f" (and {more} more)" if more > 0 else ""
            self.say(f"could not be measured: {'; '.join(profile.missing[:shown])}{rest}")


class LivePlanning:
    """What was measured, chosen and predicted for a trainer. rows: of its global batches."""

    def __init__(
        self, model: Model, optimizer: Optimizer, example: Any, world: World,
        headroom: str | None, say: Say, allowed: Allowance = NOTHING,
    ) -> None:  # fmt: skip
        self.allowed = allowed
        self.model, self.optimizer, self.world, self.say = model, optimizer, world, say
        self.memory = RankMemory(model, optimizer, world, headroom, say)
        self.rows = batches.row_count(example)
        self.choice: Choice | None = None  # how the plan was found, where it was `auto`
        self.profile: Profile | None = None
        self.prepared = Prepared()
        self._others: dict[int, PartitionCache] = {}  # of these, by how many they are
        self._example = example
        self._choice_rows = self.rows  # that `choice` was made for
        self._facts: LiveFacts | None = None

    def facts(self, step: Step) -> LiveFacts:
        """What a plan is wanted for; partitions that were solved for it are kept with it."""
        facts = self._facts
        if facts is None or facts.problem.step is not step or facts.problem.rows != self.rows:
            facts = self._facts = LiveFacts.of(
                self.world, self.model, step, self.optimizer, self._example, self.rows,
                self.memory.headrooms, self.allowed,
            )  # fmt: skip
        return facts

    def _without_copies(self) -> bool:
        """Leaves out the copies of the state that are made where there is room alone; whether
        there were any."""
        own = self.world.member
        if own is None or own.replicate != "auto" or not own.copying:
            return False
        own.copying, self._facts = (), None
        return True

    def regroup(self) -> None:
        """The world has other ranks, and what was measured is of those before; all call alike."""
        self.memory.share_anew()
        self.choice = self.profile = self._facts = None
        self.prepared = Prepared()

    def prepare(
        self, step: Step, known: Profile, hosts: Sequence[str], current: Plan, gain: float,
        of_ranks: bool,
    ) -> None:  # fmt: skip
        """What ranks that are left without a host, or more of them, go on with: a plan by `known`,
        and of fewer ranks its partition. hosts: of each rank. gain: as of `OtherRanks.best`.
        of_ranks: whether batches grow with ranks. All call alike, each searches for some."""
        world, problem = self.world, replace(self.facts(step).problem, allowed=NOTHING)
        cases = likely(hosts)
        self.say(f"preparing plans for {len(cases)} cases of a loss, or of a host that comes ...")

        def other(before: Before) -> OtherRanks:
            rows = max(1, self.rows * len(before) // world.size) if of_ranks else self.rows
            return OtherRanks.of(replace(problem, rows=rows), known, before, hosts)

        def best(before: Before) -> tuple[str, str]:
            try:
                return str(other(before).best(current, gain) or ""), ""
            except Exception as error:  # what may never be needed does not end the run
                return "", f"no plan is prepared for {len(before)} ranks: {message(error)}"

        mine = [*enumerate(cases)][world.rank :: world.size]
        table = world.everyone.all_gather_json([(n, *best(before)) for n, before in mine])
        found = [*chain(*table)]
        for fault in dict.fromkeys(fault for _, _, fault in found if fault):
            self.say(fault)
        plans = {cases[n]: Plan.parse(text) for n, text, _ in found if text}
        less = {len(b): b for b in plans if len(b) < world.size}
        self._others = {size: other(before).partitions for size, before in less.items()}
        for before, plan in plans.items():
            if len(before) in self._others:
                self._others[len(before)].possible([plan])
        self.prepared = Prepared(plain(current), self.rows, plans)

    def session(self, step: Step) -> LiveSession:
        return LiveSession(self.facts(step), self.say)

    def solved(self, step: Step, plan: Plan) -> Partition | None:
        """Its partition, if all ranks have it, which call alike: rank 0 solves more of them."""
        there = self._facts.partitions if self._facts else self._others.get(self.world.size)
        known = None
        if there is not None and there.problem.step is step:
            with suppress(ValueError):  # these ranks do not divide
                known = there.known(plan)
        return known if all(self.world.everyone.all_gather_json(known is not None)) else None

    def choose(self, step: Step) -> Plan:
        try:
            self.choice = self.session(step).best()
        except ValueError:
            if not self._without_copies():
                raise
            self.choice = self.session(step).best()
        self._choice_rows = self.rows
        self.profile = self.choice.profile if self.choice.chosen.time else None
        return self.choice.chosen.plan

    def candidates(self) -> tuple[Candidate, ...]:
        """That the plan was chosen from, it first; none if it was given, or rows have changed."""
        choice = self.choice if self.rows == self._choice_rows else None
        return choice.candidates if choice else ()

    def cut(self, step: Step, plan: Plan) -> Plan:
        """`plan`, which leaves its cuts open, with stages of level work; measures the components
        under its layouts where that has not been done. ValueError where it has too many."""
        return self.session(step).cut(plan, self.profile)

    def predict(self, step: Step, plan: Plan, known: Profile | None = None) -> Candidate:
        """What `plan` is predicted to take; measures what is neither in `known` (else in
        this session's profile) nor among the profiles that are kept."""
        chosen = next(iter(self.candidates()), None)
        if chosen is not None and chosen.time is not None and chosen.plan == plan:
            return chosen
        known = self.profile if known is None else known
        candidate, self.profile = self.session(step).predict(plan, known)
        if candidate.memory and not candidate.fits and self._without_copies():
            candidate, self.profile = self.session(step).predict(plan, self.profile)
        if candidate.memory:
            self._warn_of_shortage(candidate)
        return candidate

    def quickest(self, step: Step, plans: Sequence[Plan | str]) -> Candidate:
        """The candidate of least predicted time among those that fit the devices; measures what
        is not known yet. ValueError, with each plan's reason, where none can run."""
        session, candidates = self.session(step), list[Candidate]()
        for plan in plans:
            candidate, self.profile = session.priced(parsed(plan), self.profile)
            candidates.append(candidate)
            if candidate.memory:
                self._warn_of_shortage(candidate)
        best = quickest(candidates)
        if not best.fits or best.time is None:
            faults = zip(plans, candidates, strict=True)
            told = "; ".join(f"{asked}: {c.reason}" for asked, c in faults)
            raise ValueError(f"none of these plans can run: {told}")
        return best

    def check_held(self, plan: Plan, holdings: Mapping[str, Holding]) -> None:
        """Warns early where parameters, gradients and optimizer state alone take too much."""
        chosen = None if self.choice is None else self.choice.chosen
        if chosen is not None and chosen.memory and chosen.plan == plan:
            self._warn_of_shortage(chosen)
        else:
            self._warn_of_shortage(self.memory.held(plan, holdings))

    def _warn_of_shortage(self, candidate: Candidate) -> None:
        given = self.choice is None or self.choice.chosen.plan != candidate.plan
        self.memory.warn_of_shortage(candidate, self.rows, given)

    def explained(self, step: Step) -> Choice | None:
        choice = self.choice
        if choice is not None and choice.chosen.time is not None and not choice.components:
            self.choice = with_runners_up(self.facts(step).partitions, choice)
        return self.choice

    def surveyed(self, step: Step) -> Profile:
        """The profile of all layouts; measures what neither these ranks nor those before know."""
        if self.choice is None or self.profile is None:
            self.say("measuring the other layouts, to know what there is to change to ...")
            self.profile = self.session(step).survey(self.profile)
        return self.profile
