"""Plans for ranks that nobody has measured, by what was measured of others: against what data
sheets say of them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from synchromesh.adapt.decision import LIMITS
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.candidate import price
from synchromesh.planner.decision.decide import decide, survey
from synchromesh.planner.problem import PlanningProblem
from synchromesh.planning.live import LivePlanning
from synchromesh.planning.other_ranks import Before, OtherRanks, Prepared, likely
from synchromesh.values.cluster import Cluster, Device, Host, Link
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from tests.models import family, traced

GAIN, NEW = LIMITS.gain, OtherRanks.NEW


def facts(name: str, rates: Sequence[float]) -> DatasheetFacts:
    """Of hosts with one device each, of so many FLOP/s, behind equal links."""
    devices = [Device("cpu", 8 * 10**9, {"float64": rate}, 1e10) for rate in rates]
    hosts = tuple(Host(f"h{n}", (device,)) for n, device in enumerate(devices))
    cluster = Cluster("these", hosts, network=Link("*", "*", 2.5e7, 1e-4))
    model = family(name)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    return DatasheetFacts.of(traced(name), model, optimizer, 60, cluster)


@cache
def known(name: str, *rates: float) -> tuple[PlanningProblem, Profile]:
    """Once a plan for these was decided."""
    found = facts(name, rates)
    return found.partitions.problem, decide(found, survey(found)).profile


def others(name: str, before: Before, *rates: float, limit: float = 1e9) -> OtherRanks:
    problem, profile = known(name, *(rates or (1e9,) * 4))
    return OtherRanks.of(replace(problem, limits=(limit,) * 4), profile, before, "abcd")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("abc", {(0, 2), (0, 1), (0, 1, 2, NEW)}),
        ("aabbcc", {(0, 1, 4, 5), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, NEW, NEW)}),
        ("aaa", {(1, 2), (0, 2), (0, 1), (0, 1, 2, NEW)}),
    ],
)
def test_each_host_but_the_coordinators_may_go_and_one_may_come(
    hosts: str, expected: set[Before]
) -> None:
    assert {*likely(hosts)} == expected


@pytest.mark.parametrize(
    ("name", "before"),
    [("gpt2", (0, 1, 3)), ("odd_mlp", (0, 1, 2, 3, NEW)), ("odd_mlp", (0, 1))],
)
def test_plans_take_what_data_sheets_say_of_these_ranks(name: str, before: Before) -> None:
    found = others(name, before)
    truth = facts(name, [1e9] * len(before))
    estimated, sheet = survey(found, found.known), survey(truth)
    for text in ("data", "zero1", "sharded-data", "single"):
        plan = Plan.parse(text)
        seconds = price(truth.partitions, plan, sheet).seconds
        assert price(found.partitions, plan, estimated).seconds == pytest.approx(seconds, rel=GAIN)
    best, least = found.best(Plan.parse("data"), 0.0), decide(truth, sheet).chosen.seconds
    assert best is not None
    assert price(truth.partitions, best, sheet).seconds < (1.0 + GAIN) * least


def test_slow_ranks_memory_and_hosts_are_those_of_the_ranks_that_are_left() -> None:
    befores = (0, 1, 2), (0, 1, 3, NEW)
    quick, slow = (others("odd_mlp", b, 1e7, 1e7, 1e7, 1e6) for b in befores)
    assert quick.known.relative_slowdowns == (1.0, 1.0, 1.0)
    assert slow.known.relative_slowdowns == pytest.approx((1.0, 1.0, 10.0, 1.0), rel=0.1)
    assert quick.known.devices == 3 == len(quick.partitions.problem.limits)
    best = [found.best(Plan.parse("data"), GAIN) for found in (quick, slow)]
    assert [p and (p.ranks, p.rows) for p in best] == [(None, None), ((0, 1, 3), None)]


def test_the_plan_of_before_is_kept_where_no_other_is_clearly_quicker() -> None:
    found = others("gpt2", (0, 1, 2))
    estimated = survey(found, found.known)
    plans = [Plan.parse(text) for text in ("zero1", "sharded-data")]
    seconds = [price(found.partitions, plan, estimated).seconds for plan in plans]
    best = found.best(plans[0], 0.0)
    assert best is not None
    gain = 1.0 - price(found.partitions, best, estimated).seconds / seconds[0]
    assert found.best(plans[0], gain + 0.001) == plans[0] != found.best(plans[0], gain - 0.001)


def test_nothing_is_prepared_that_does_not_fit() -> None:
    found = others("odd_mlp", (0, 1, 2), limit=0.0)
    assert found.best(Plan.parse("data"), 0.0) is None


def test_open_pieces_are_no_other_plan() -> None:
    plan = Plan.parse("tensor")
    assert others("odd_mlp", (0, 1)).best(plan, 0.999) == plan


def test_plans_hold_while_the_plan_and_the_rows_are_those_of_then() -> None:
    plan, plans = Plan.parse("data"), {(0, 1): Plan.parse("zero1")}
    prepared = Prepared(plan, 12, plans)
    assert prepared.under(Plan.parse("data; @pieces=4"), 12) == plans
    assert prepared.under(plan, 24) == prepared.under(Plan.parse("zero1"), 12) == {}


@pytest.mark.parametrize(("of_ranks", "rows"), [(False, [60] * 4), (True, [45, 45, 45, 75])])
def test_cases_are_searched_with_their_rows_and_one_that_fails_is_told(
    of_ranks: bool, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, profile = known("odd_mlp", *(1e9,) * 4)
    seen, said = list[int](), list[str]()

    def best(self: OtherRanks, current: Plan, gain: float) -> Plan:
        seen.append(self.partitions.problem.rows)
        if self.partitions.problem.devices == 5:
            raise RuntimeError("no such facts")
        return current

    monkeypatch.setattr(OtherRanks, "best", best)
    alone = SimpleNamespace(
        rank=0, size=4, everyone=SimpleNamespace(all_gather_json=lambda x: [x])
    )
    planning: Any = SimpleNamespace(
        world=alone, rows=60, say=said.append, facts=lambda _: SimpleNamespace(problem=problem)
    )
    found = dict[tuple[int, ...], Plan]()
    for alone.rank in range(4):
        LivePlanning.prepare(
            planning, problem.step, profile, "abcd", Plan.parse("data"), GAIN, of_ranks
        )
        found |= planning.prepared.plans
    assert (seen, set(found)) == (rows, {(0, 2, 3), (0, 1, 3), (0, 1, 2)})
    assert said[-1] == "no plan is prepared for 5 ranks: no such facts"
