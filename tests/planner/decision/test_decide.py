"""Deciding by facts that are made up: what is asked of them, and what is made of the answers."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from synchromesh.planner.candidate import Candidate, planned_step
from synchromesh.planner.decision.decide import decide, survey, with_runners_up
from synchromesh.planner.problem import (
    Demand,
    Facts,
    Find,
    PartitionCache,
    PlanningProblem,
    Read,
    Write,
)
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.partition import Partition
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Compute, Curve, Memory, Profile
from tests.cost.plans import flat
from tests.models import traced

T = TypeVar("T")
DEVICES, ROWS = 2, 8


@dataclass
class Flat:
    """Every program takes `seconds[rank]` a row, every collective nothing; asks are written down,
    and everything that is found goes through JSON, as between ranks."""

    partitions: PartitionCache
    seconds: tuple[float, ...] = (1.0, 1.0)
    extrapolation: float = float("inf")
    knows: bool = True
    asked: list[tuple[int, int]] = field(default_factory=list)  # ranks, rows
    records: list[Any] = field(default_factory=list)

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
        self.asked.append((DEVICES if ranks is None else len(ranks), rows or ROWS))
        links = flat(planned_step(self.partitions, Plan.parse("data"))).network
        profile = known or Profile(DEVICES, network=links)
        curves = tuple(Curve(((0.0, 0.0), (1.0, s))) for s in self.seconds)
        found = {
            c.program: Compute(curves, curves, Memory()) for p in partitions for c in p.components
        }
        return replace(profile, compute={**profile.compute, **found} if self.knows else {})

    def agreed(self, find: Find[T], write: Write[T], read: Read[T]) -> list[T]:
        self.records.append([write(item) for item in find()])
        return [read(record) for record in self.records[-1]]


@pytest.fixture
def partitions() -> PartitionCache:
    return PartitionCache(PlanningProblem(traced("odd_mlp"), ROWS, DEVICES))


def texts(candidates: Iterable[Candidate]) -> set[str]:
    return {str(c.plan).partition("; @pieces")[0] for c in candidates}


def test_the_plain_plans_and_the_one_in_force_are_priced(partitions: PartitionCache) -> None:
    facts: Facts = Flat(partitions)
    current = Plan.parse("data; *=data")
    found = decide(facts, survey(facts), current)
    assert {"single", "data", "tensor", "data; *=data"} <= texts(found.candidates)
    assert found.chosen.plan.default.name == "data" and found.components == ()
    assert all(c.reason for c in found.candidates) and found.planning_seconds > 0


def test_candidates_are_the_same_on_the_other_side(partitions: PartitionCache) -> None:
    facts = Flat(partitions)
    decide(facts, survey(facts))
    priced = [r for batch in facts.records for r in batch if isinstance(r, dict)]
    assert priced and all(Candidate.from_record(r).to_record() == r for r in priced)


def test_rows_by_speed_are_timed_before_they_are_believed(partitions: PartitionCache) -> None:
    sure = Flat(partitions, (1.0, 4.0))
    found = decide(sure, survey(sure))
    assert str(found.chosen.plan).startswith("data; @rows=4,1")
    assert {rows for _, rows in sure.asked} == {ROWS}
    unsure = Flat(partitions, (1.0, 4.0), extrapolation=1.5)
    again = decide(unsure, survey(unsure))
    assert (DEVICES, 13) in unsure.asked, "4/5 of the rows are 1.6 times an equal block"
    assert again.chosen.plan == found.chosen.plan


def test_an_optimizer_that_needs_whole_parameters(partitions: PartitionCache) -> None:
    problem = replace(partitions.problem, unsplittable="it sums over rows of a parameter")
    cache = PartitionCache(problem)
    facts = Flat(cache)
    found = decide(facts, survey(facts))
    refused = {str(c.plan): c.reason for c in found.candidates if not c.fits}
    assert refused["tensor"].startswith("it sums over rows of a parameter")


def test_nothing_known_is_nothing_priced(partitions: PartitionCache) -> None:
    facts = Flat(partitions, knows=False)
    found = decide(facts, survey(facts), explained=True)
    assert all(c.time is None for c in found.candidates) and found.components == ()
    assert with_runners_up(partitions, found) == found


def test_runners_up_where_they_are_asked_for(partitions: PartitionCache) -> None:
    facts = Flat(partitions)
    found = decide(facts, survey(facts), explained=True)
    assert [row.component for row in found.components] == list(partitions.problem.names)
    assert found.components_of == found.chosen.plan and not found.of
    assert with_runners_up(partitions, replace(found, components=())) == found


def test_runners_up_to_stages_are_of_the_best_plan_of_one_stage(
    partitions: PartitionCache,
) -> None:
    facts = Flat(partitions)
    found = decide(facts, survey(facts))
    first, last = partitions.problem.names[0], partitions.problem.names[-1]
    staged = Plan.parse(f"data; @stages=0:{first}/1:{last}")
    chosen = replace(found, candidates=(replace(found.chosen, plan=staged), *found.candidates))
    told = with_runners_up(partitions, chosen)
    assert told.components_of in [c.plan for c in found.candidates]
    of = str(told.components_of)
    assert told.of == f"of {of!r}, the search's best plan of one stage on all devices"
    assert told.to_dict()["components_of"] == str(told.components_of)


def test_a_partition_is_solved_once(partitions: PartitionCache) -> None:
    plan = Plan.parse("tensor")
    assert partitions.known(plan) is None
    assert partitions.partition(plan) is partitions.partition(plan) is partitions.known(plan)
    assert partitions.possible([plan, Plan.parse("data; nowhere=tensor")]) == [
        partitions.known(plan)
    ]


def test_where_rows_depend_on_each_other_a_plan_says_nothing_of_the_layout() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    step = trace(model, contrast, torch.randn(ROWS, 8), training=True)
    partitions = PartitionCache(PlanningProblem(step, ROWS, DEVICES))
    facts = Flat(partitions)
    found = decide(facts, survey(facts), explained=True)
    assert {"single", "data", "tensor"} <= texts(found.candidates)
    assert not any("2=" in text for text in texts(found.candidates))
    last = found.components[-1]
    assert (last.component, str(last.layout), last.other) == ("2", "1x2", None)


def contrast(model: nn.Module, batch: Tensor) -> Tensor:
    z = model(batch)
    return (z @ z.t()).logsumexp(1).mean()  # type: ignore[no-any-return]
