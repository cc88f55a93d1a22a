"""Plans that need less memory than one that does not fit."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from synchromesh import catalogue
from synchromesh.cost.alive_bytes import PeakMemory
from synchromesh.cost.step_time import StepTime
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.candidate import Candidate, price
from synchromesh.planner.chain.assemble import SAVINGS, Assembled, ChainSearch, assemble
from synchromesh.planner.chain.problem import ChainPlan, Problem, evaluate
from synchromesh.planner.chain.search import search
from synchromesh.planner.decision.decide import decide, survey
from synchromesh.planner.decision.memory import (
    SavingSearches,
    nearest_lacking,
    savings,
    ways_to_save,
)
from synchromesh.planner.problem import PartitionCache, PlanningProblem
from synchromesh.planner.uniform import uniform_partitions
from synchromesh.planner.wording import worded
from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Curve, Pattern, Profile
from synchromesh.values.unsupported import unsupported
from tests.models import traced
from tests.planner.chain.test_assemble import profiled


def candidate(text: str, seconds: float, fits: bool, update: float = 0.0) -> Candidate:
    time = StepTime(seconds, 0.0, 0.0, update, 0.0, 0.0, 1)
    return Candidate(Plan.parse(text), time, (), fits, "")


def test_what_fits_and_is_quickest_asks_for_nothing() -> None:
    found = [candidate("data", 1.0, True), candidate("tensor", 2.0, False)]
    assert nearest_lacking(found, ()) is None


def test_the_quickest_plan_that_lacks_memory_comes_first() -> None:
    found = [candidate("tensor", 2.0, False), candidate("data", 1.0, False)]
    assert nearest_lacking(found, ()) is found[1]
    assert nearest_lacking(found, {found[1].plan}) is found[0]
    assert nearest_lacking(found, {c.plan for c in found}) is None


def test_sharded_states_leave_less_to_update() -> None:
    fitting = candidate("tensor", 1.0, True)
    assert nearest_lacking([fitting, candidate("data", 1.2, False, update=0.3)], ())
    assert nearest_lacking([fitting, candidate("data", 1.2, False, update=0.1)], ()) is None


def exact(seconds: float, peak: int) -> Candidate:
    return replace(candidate("zero1", seconds, False), memory=(PeakMemory(0, peak),))


def search_of(memory: int) -> ChainSearch:
    return ChainSearch(Assembled(Problem(()), ()), 0.0, ChainPlan((), 1.0, memory))


def test_the_next_search_needs_less_by_what_the_one_before_lacked() -> None:
    first = SavingSearches(100.0)
    assert first.limit_of_sums(None) == pytest.approx(110.0)
    assert first.limit_of_sums(search_of(90)) == pytest.approx(110.0), "of other plans"
    lacking = first.after(exact(1.0, 112), least=2.0)
    assert lacking.limit_of_sums(search_of(105)) == 93.0
    leaves = lacking.after(exact(1.5, 96), least=2.0)
    assert leaves.limit_of_sums(search_of(93)) == 97.0
    assert leaves.left == first.left - 2


def test_a_plan_that_lacks_memory_and_is_no_quicker_ends_the_searches() -> None:
    first = SavingSearches(100.0)
    assert first.after(exact(2.0, 101), least=2.0).left == 0
    assert first.after(exact(2.0, 100), least=2.0).left == first.left - 1, "it fits"
    assert first.after(exact(1.9, 101), least=2.0).left == first.left - 1


@pytest.fixture
def facts() -> tuple[PartitionCache, Profile]:
    """Of four devices."""
    partitions = PartitionCache(PlanningProblem(traced("gpt2"), 12, 4, limits=(1e12,) * 4))
    return partitions, profiled(uniform_partitions(partitions))


def texts(facts: tuple[PartitionCache, Profile], plan: str, limit: float = 1e12) -> list[str]:
    partitions, profile = facts
    partitions.problem = replace(partitions.problem, limits=(limit,) * 4)
    anything = next(iter(profile.compute.values()))
    programs = [c.program for c in partitions.partition(Plan.parse(plan)).components]
    profile = replace(profile, compute=dict.fromkeys(programs, anything) | dict(profile.compute))
    return list(map(str, savings(partitions, Plan.parse(plan), profile)))


def test_no_more_is_saved_than_must_be(facts: tuple[PartitionCache, Profile]) -> None:
    cut = "@micro_batches=2"  # 12 rows on 4 devices: of 4 a micro-batch has less than one for each
    lean = f"sharded-data; {cut}"
    assert texts(facts, "data") == ["zero1", "data:recompute=yes", f"data; {cut}", lean]
    least = ["sharded-data", "sharded-data:recompute=yes"]
    assert texts(facts, "data", 0.0) == least, "the least that is lacking is said"


def test_states_are_sharded_under_a_schedule_that_may(
    facts: tuple[PartitionCache, Profile],
) -> None:
    names = traced("gpt2").chain.names
    plan = f"data; @stages=0,1:{names[0]}/2,3:{names[3]}; @micro_batches=2; @schedule=zero-bubble"
    found = [Plan.parse(text) for text in texts(facts, plan)]
    assert found and not any(unsupported(p) for p in found)
    schedules = {any(s.states != "none" for s in p.specs): p.schedule for p in found}
    assert schedules == {True: "1f1b", False: "zero-bubble"}, "recomputation goes with both"


def test_micro_batches_that_take_turns_are_one_where_four_lack_memory() -> None:
    partitions = PartitionCache(PlanningProblem(traced("gpt2"), 64, 4, limits=(1e12,) * 4))
    known = profiled(uniform_partitions(partitions))
    gathered = {
        ("all_gather", Pattern(2, 2)): Curve(((1.0, 2e-6),)),
        ("reduce_scatter", Pattern(2, 2)): Curve(((1.0, 2e-6),)),
    }
    profile = replace(known, network={**known.network, **gathered})
    text = "hybrid:tensor=2,states=parameters"
    one, four = (price(partitions, Plan.parse(f"{text}; @pieces={n}"), profile) for n in (1, 4))
    assert one.fullest and four.fullest
    assert four.seconds < one.seconds and four.fullest.peak > one.fullest.peak
    for limit, taken in ((1e12, four), (one.fullest.peak, one), (0.0, four)):
        partitions.problem = replace(partitions.problem, limits=(limit,) * 4)
        found = price(partitions, Plan.parse(text), profile)
        assert (found.seconds, found.memory) == (taken.seconds, taken.memory)
        assert found.fits == (limit > 0) and str(found.plan) == text


def test_tensor_ranks_have_nothing_to_shard(facts: tuple[PartitionCache, Profile]) -> None:
    for plan in ("tensor", "single"):
        assert texts(facts, plan) == [f"{plan}:recompute=yes", f"{plan}; @micro_batches=2"]


def test_an_optimizer_that_needs_whole_parameters_gets_them(
    facts: tuple[PartitionCache, Profile],
) -> None:
    partitions, _ = facts
    why = "the optimizer cannot update pieces"
    partitions.problem = replace(partitions.problem, unsplittable=why)
    assert texts(facts, "data") == ["data:recompute=yes", "data; @micro_batches=2"]
    assert {states for states, _ in ways_to_save(partitions.problem)} == {"none"}
    with pytest.raises(ValueError, match=why):
        partitions.partition(Plan.parse("zero1"))


def test_layouts_of_components_and_stages_are_kept(
    facts: tuple[PartitionCache, Profile],
) -> None:
    assert texts(facts, "hybrid:tensor=2; lm_head=data") == [
        "hybrid:tensor=2,states=optimizer; lm_head=zero1",
        "hybrid:tensor=2,recompute=yes; lm_head=data:recompute=yes",
        "hybrid:tensor=2; lm_head=data; @micro_batches=2",
        "hybrid:tensor=2,states=parameters; lm_head=sharded-data; @micro_batches=2",
    ]
    first, *_, last = facts[0].problem.names
    stages = f"@stages=0,1:{first}/2,3:{last}; @micro_batches=2"
    assert texts(facts, f"data; {stages}") == [f"zero1; {stages}", f"data:recompute=yes; {stages}"]


DEVICES, ROWS = 2, 4096


# Bytes of mixed layouts are up to 12 % off in the search, so that it passes by the quickest plans
# that fit: without the descent by exact prices the plans taken took 1.21, 1.08, 1.13 and 1.00 of
# their seconds, and with it 1.00.
CLOSE = 1.02


@pytest.mark.slow
def test_no_choice_for_each_component_is_much_quicker() -> None:
    """Every choice of degree, level and recomputation for each of three components, and in four
    micro-batches those without recomputation, priced exactly, beside the plan that is taken; and
    the search beside brute force over its sums."""
    with torch.device("meta"):
        layers = nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.GELU()
        model = nn.Sequential(*layers, nn.Linear(1024, 2048))
    step = trace(model, lambda m, x: m(x).square().mean(), torch.empty(ROWS, 1024), training=True)
    problem = PlanningProblem(step, ROWS, DEVICES, {}, (1e12,) * DEVICES)
    assert len(problem.names) == 3
    partitions = PartitionCache(problem)
    optimizer, cluster = torch.optim.AdamW(model.parameters()), catalogue.cluster("v100x2")
    facts = DatasheetFacts(partitions, optimizer, cluster)
    known = survey(facts)
    offered = [Layout(2, 1, *saving) for saving in SAVINGS]
    offered += [Layout(1, 2, recompute=recompute) for recompute in (False, True)]
    every = [worded(problem.names, x, problem.modules) for x in product(offered, repeat=3)]
    kept = [plan for plan in every if not any(spec.recompute for spec in plan.specs)]
    every += [replace(plan, micro_batches=4) for plan in kept]
    profile = facts.profile(partitions.possible(every), known, micro_batches=(1, 4))
    plans = [price(partitions, plan, profile) for plan in every]
    sums = assemble(uniform_partitions(partitions), profile, SAVINGS).problem
    choices = product(*(range(len(options)) for options in sums.components))
    summed = [evaluate(sums, choice) for choice in choices]
    peaks = sorted({c.fullest.peak for c in plans if c.fullest})
    for part in (0.1, 0.2, 0.3, 0.4):
        limit = peaks[0] + part * (peaks[-1] - peaks[0])
        if sure := [seconds for seconds, memory in summed if memory <= limit]:
            assert search(sums, limit).seconds == pytest.approx(min(sure), rel=1e-12)
        partitions.problem = replace(problem, limits=(limit,) * DEVICES)
        fitting = [c.seconds for c in plans if c.fullest and c.fullest.peak <= limit]
        chosen = decide(facts, known).chosen
        assert chosen.fits, f"{part}: {chosen.reason}"
        assert chosen.seconds <= min(fitting) * CLOSE, f"{part}: {chosen.plan}"
