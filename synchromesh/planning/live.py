"""Planning on the ranks of this run: measure, decide, and predict a plan that is given.

Facts that are kept from an earlier run are sampled instead (`profiling/profile_cache.py`). All
ranks call alike."""

import warnings
from collections.abc import Iterator, Sequence

import torch

from synchromesh.engine import heap
from synchromesh.engine.groups import World
from synchromesh.launch.machine import Machine, machine_of
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.choice import Choice
from synchromesh.planner.decision.decide import decide, survey
from synchromesh.planner.memory.misfit import misfit
from synchromesh.planner.stages.cut import cut_plan, measured_work, unstaged
from synchromesh.planner.uniform import uniform
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.profiling.profile_cache import ProfileCache, Say
from synchromesh.programs.memory import process_bytes
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile

SHOWN_MISSING = 3  # of what could not be measured, that a message lists


def silent(_: str) -> None:
    """Says nothing."""


def choose(facts: LiveFacts, say: Say = silent) -> Choice:
    """The plan that is chosen of those that fit every device. ValueError where none does.

    say: is told, on every rank, what is measured and what is reused."""
    world, step = facts.world, facts.problem.step
    if step.opaque or world.size == 1:
        return _only(facts)
    cache = ProfileCache.open(facts, range(world.size))
    known = cache.profile(uniform(facts.partitions).partitions.values(), say)
    if known is None:
        say(f"measuring {len(step.chain.components)} components on {world.size} ranks ...")
    choice = reconsider(facts, survey(facts.partitions, facts, known))
    cache.keep(choice.profile, known)
    heap.release()  # training begins with the memory that measuring has taken
    spent = choice.profile.seconds
    say(f"measured for {spent:.1f} s, searched for {choice.planning_seconds:.1f} s")
    _say_missing(choice.profile, say)
    return choice


def _say_missing(profile: Profile, say: Say) -> None:
    """What could not be measured: plans that need it are priced without it, or not at all."""
    if profile.missing:
        more = len(profile.missing) - SHOWN_MISSING
        rest = f" (and {more} more)" if more > 0 else ""
        say(f"could not be measured: {'; '.join(profile.missing[:SHOWN_MISSING])}{rest}")


def reconsider(facts: LiveFacts, profile: Profile, current: Plan | None = None) -> Choice:
    """The choice from facts that are known; what is new in the best plans is measured. ValueError
    where no plan fits.

    current: the plan in force, which is priced among the candidates."""
    choice = decide(facts.partitions, facts, profile, current)
    if all(c.time is None for c in choice.candidates):
        return _unpriced(facts.world, choice)
    if not choice.chosen.fits:
        raise ValueError(*facts.agreed(lambda: [misfit(choice, facts.partitions)], str, str))
    return choice


def predict(
    facts: LiveFacts, plan: Plan, known: Profile | None = None, say: Say = silent
) -> tuple[Candidate, Profile]:
    """The prediction of a given plan, with the measurements that it takes.

    known: of this run, on any ranks; what is measured besides it is not kept for other runs."""
    problem = facts.problem
    if problem.step.opaque:
        reason = "the model runs whole: nothing was measured"
        return Candidate(plan, None, (), True, reason), known or Profile(problem.devices)
    ranks, partition = problem.ranks(plan), facts.partitions.partition(plan)
    if known is None:
        profile = _measured_once(facts, partition, ranks, say, plan.micro_batches)
    else:
        profile = facts.profile([partition], known, ranks, micro_batches=(plan.micro_batches,))
    return price(facts.partitions, plan, profile), profile


def cut(facts: LiveFacts, plan: Plan, known: Profile | None, say: Say = silent) -> Plan:
    """`plan` with stages of level work, as measured on these ranks. ValueError where its stages do
    not divide the devices."""
    problem = facts.problem
    alone, parts = unstaged(plan, problem.devices), plan.micro_batches
    ranks, partition = problem.ranks(alone), facts.partitions.partition(alone)
    if known is None:
        say(f"measuring {len(problem.names)} components to cut them into stages ...")
        profile = _measured_once(facts, partition, ranks, say, parts)
    else:
        profile = facts.profile([partition], known, ranks, micro_batches=(parts,))

    def find() -> list[Plan]:
        work = measured_work(facts.partitions, plan, profile)
        return [cut_plan(problem.step, plan, work, problem.devices)]

    return facts.agreed(find, str, Plan.parse)[0]


def _measured_once(
    facts: LiveFacts, partition: Partition, ranks: Sequence[int], say: Say, micro_batches: int
) -> Profile:
    """The facts of one partition: those that are kept, and those that are missing there.
    micro_batches: into how many the rows are cut."""

    def likely() -> Iterator[Partition]:
        yield partition
        yield from uniform(facts.partitions).partitions.values()  # what `auto` has measured

    cache = ProfileCache.open(facts, ranks)
    known = cache.profile(likely(), say)
    profile = facts.profile([partition], known, ranks, micro_batches=(micro_batches,))
    cache.keep(profile, known)
    heap.release()
    say(f"measured for {profile.seconds:.1f} s")
    _say_missing(profile, say)
    return profile


def memory_share(world: World) -> int:
    """Bytes of its device that each rank may use: those of a host's memory are divided over its
    ranks (`Machine.sharers`). All ranks call alike."""
    mine = machine_of(world.rank, world.device)
    machines = [Machine.from_dict(m) for m in world.everyone.all_gather_json(mine.to_dict())]
    return mine.memory_bytes // mine.sharers(machines)


def free_bytes(share: int, device: torch.device) -> int:
    """What is left of `share` bytes, once what was freed is given back to the system."""
    if device.type == "cuda":
        return share - torch.cuda.memory_allocated(device)
    heap.release()
    return max(0, share - process_bytes())


def _unpriced(world: World, choice: Choice) -> Choice:
    """`data` where nothing is known of any plan: training warns, it does not fail for it."""
    reason = choice.chosen.reason or "nothing could be measured"
    if world.rank == 0:
        missing = "; ".join(choice.profile.missing[:2])
        warnings.warn(
            f"no plan could be predicted, so it is `data` ({reason}; {missing})", stacklevel=2
        )
    return Choice.only(Plan(LayoutSpec("data")), reason, choice.profile)


def _only(facts: LiveFacts) -> Choice:
    """The one plan of a model that could not be traced, or on one device."""
    devices = facts.world.size
    if devices > 1:
        return Choice.untraced(facts.problem.step, Profile(devices))
    return Choice.only(Plan(LayoutSpec("single")), "one device", Profile(devices))
