"""The choice by time and money: against brute force, and one trace for all batch sizes."""

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from synchromesh import catalogue
from synchromesh.catalogue.prices import HourlyPrice, cluster_price
from synchromesh.cost.efficiency import EpochCurve, Goal, ToTarget
from synchromesh.cost.target_plans import PlannedToTarget, TargetPlan
from synchromesh.planning.offline import plan
from synchromesh.planning.to_target import plan_to_target
from synchromesh.values.plan import Plan
from synchromesh.workloads.target import PUBLISHED, load, rows_of_an_epoch


def made(*costs: tuple[float, float | None]) -> PlannedToTarget:
    data = Plan.parse("data")
    return PlannedToTarget(
        tuple(
            TargetPlan("c", i, data, ToTarget(1.0, 1, seconds, dollars))
            for i, (seconds, dollars) in enumerate(costs, 1)
        )
    )


def test_the_choice_is_that_of_brute_force() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        values = draw.integers(1, 9, (draw.integers(1, 12), 2)).tolist()
        some = [(float(s), None if draw.random() < 0.2 else float(d)) for s, d in values]
        found = made(*some)
        costs = [p.cost for p in found.plans]
        best = {
            x for x in costs
            if not any(y[0] <= x[0] and y[1] <= x[1] and y != x for y in costs)
        }  # fmt: skip
        assert [p.cost for p in found.frontier] == sorted(best)
        for by_money, deadline in product((False, True), (3.0, 6.0, inf)):
            asked = replace(found, by_money=by_money, deadline=deadline)
            allowed = [x for x in costs if x[0] <= deadline and (x[1] < inf or not by_money)]
            by = (lambda x: (x[1], x[0])) if by_money else (lambda x: x)
            chosen = asked.chosen
            assert (chosen and chosen.cost) == (min(allowed, key=by) if allowed else None)
            assert bool(asked.refusal) == (chosen is None and bool(asked.candidates))


def test_a_refusal_has_the_numbers_of_the_quickest() -> None:
    late = replace(made((20.0, 4.0), (10.0, 8.0), (5.0, None)), by_money=True, deadline=7.0)
    assert late.refusal == (
        "nothing reaches the target within 7 s: the quickest, data on c in batches of 2, takes "
        "10 s and $8"
    )
    assert replace(late, by_money=False, deadline=1.0).refusal.endswith("batches of 3, takes 5 s")
    assert replace(late, deadline=10.0).plan == Plan.parse("data")


@pytest.mark.slow
def test_one_trace_serves_all_batch_sizes() -> None:
    workload, place = load("digits/cnn", synthetic=True), catalogue.cluster("v100x2")
    goal = Goal("accuracy=0.9", EpochCurve(4.0, 512.0), 1437)
    found = plan_to_target(workload, goal, [place], {place.name: None}, (32, 250, 1437))
    assert [p.batch for p in found.plans] == [32, 250, 1437]
    for p in found.plans:
        again = plan(
            workload.build(), workload.loss, workload.example(p.batch), cluster=place,
            optimizer=workload.build_optimizer,
        )  # fmt: skip
        assert p.plan == again.plan
        seconds = goal.curve.steps(p.batch, 1437) * again.choice.chosen.seconds
        assert p.until.seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "instance", "hourly"),
    [
        ("v100x1", "p3.2xlarge", 3.06), ("v100x4", "p3.8xlarge", 12.24),
        ("v100x16", "p3.16xlarge", 2 * 24.48), ("a100-40gbx8", "p4d.24xlarge", 21.957642),
        ("h100x9", "p5.48xlarge", 2 * 55.04), ("l4x1", "g6.xlarge", 0.8048),
    ],
)  # fmt: skip
def test_what_pays_for_a_cluster_of_the_catalogue(name: str, instance: str, hourly: float) -> None:
    place = catalogue.cluster(name)
    price = cluster_price(place)
    assert price is not None and price.name == instance
    assert price.dollars(3600, len(place.ranks)) == pytest.approx(hourly)


def test_a_given_price_is_of_the_devices_that_it_names() -> None:
    v100, p100 = catalogue.cluster("v100x2"), catalogue.cluster("p100x2")
    own, t4 = HourlyPrice(2.0), HourlyPrice(1.0, 1, "x", device="T4")
    assert cluster_price(v100, own) is cluster_price(p100, own) is own
    assert cluster_price(p100) is None is cluster_price(p100, t4)
    named = cluster_price(v100, t4)
    assert named is not None and named.device == "V100-16"
    mixed = replace(v100, hosts=(*v100.hosts, replace(p100.hosts[0], name="b")))
    assert cluster_price(mixed) is None


def test_rows_of_an_epoch_are_those_of_the_data_that_rows_stand_in_for() -> None:
    real, drawn = (load("digits/cnn", synthetic=x) for x in (False, True))
    assert len(drawn.train_data) != len(real.train_data) == PUBLISHED["digits"]  # type: ignore[arg-type]
    assert rows_of_an_epoch(real, "digits/cnn", False) == PUBLISHED["digits"]
    assert rows_of_an_epoch(drawn, "digits/cnn", True) == PUBLISHED["digits"]
    assert rows_of_an_epoch(drawn, "mine.py:build", True) == 4096
    assert rows_of_an_epoch(drawn, "coco/unet", True) is None
    stream = replace(real, train_data=iter_only())
    assert rows_of_an_epoch(stream, "mine.py:build", True) is None


class iter_only:
    """A stream."""

    def __iter__(self) -> object:
        return iter([1])
