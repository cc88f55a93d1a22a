"""Layer profiles that are walked as models are: against sums by hand and the planner's formula."""

import pytest

from synchromesh import catalogue
from synchromesh.planning.layer_profile import COLUMNS, LayerProfile, parse_csv
from synchromesh.planning.layers import plan_layers
from synchromesh.planning.simulation import Conditions, simulate_layers
from synchromesh.simulator.simulated import SimulatedPlan

COUNT, FORWARD, BACKWARD, BYTES = 8, 0.02, 0.04, 4_000_000


def equal(count: int = COUNT, rows: int = 4, value: int = 4_000) -> LayerProfile:
    lines = [f"b{i},{rows},{FORWARD},{BACKWARD},{BYTES},{value}" for i in range(count)]
    return parse_csv("\n".join([",".join(COLUMNS), *lines]))


def walked(plan: str, cluster: str = "h100x4", rows: int = 64) -> SimulatedPlan:
    (made,) = simulate_layers(equal(), catalogue.cluster(cluster), [plan], rows=rows).plans
    return made


def test_one_device_computes_what_was_measured() -> None:
    made = walked("single", "h100x1", rows=8)
    assert made.step is not None and made.fits
    computed = COUNT * (FORWARD + BACKWARD) * 8 / 4
    assert made.step.seconds == pytest.approx(computed, rel=0.02) and made.rows == 8
    # parameters, gradients, momentum; the first layer's value and its gradient at the last moment
    assert made.memory[0] == 3 * COUNT * BYTES + 2 * 8_000


def test_stages_fill_and_drain() -> None:
    alone, staged = walked("data"), walked("pipeline:stages=4,microbatches=16")
    assert alone.step is not None and staged.step is not None
    times = (16 + 4 - 1) / 16  # of micro-batches that all stages are at work on
    assert staged.step.seconds == pytest.approx(times * alone.step.seconds, rel=0.05)
    assert staged.step.shares["bubble"] == pytest.approx(3 / 19, abs=0.03)
    assert max(staged.memory) < max(alone.memory)


@pytest.mark.parametrize("cluster", ["v100x4", "v100-pciex8", "h100x16"])
def test_auto_is_the_plan_that_planning_finds(cluster: str) -> None:
    place = catalogue.cluster(cluster)
    found = plan_layers(equal(), place, 4)
    (made,) = simulate_layers(equal(), place).plans
    assert made.step is not None and str(made.plan) == str(found.plan)
    assert made.step.seconds == pytest.approx(found.candidates[0].seconds, rel=0.1)
    assert made.rows == 4 * len(place.ranks)


def test_what_cannot_run_says_why() -> None:
    assert walked("tensor").step is None and "tensor sharding" in walked("tensor").reason
    place = catalogue.cluster("h100x4")
    (made,) = simulate_layers(equal(), place, memory=2e7).plans
    assert made.step is None and "no stages fit 4 devices" in made.reason


def test_other_numbers_of_devices() -> None:
    place = catalogue.cluster("h100x4")
    made = simulate_layers(equal(), place, ["data"], Conditions(devices=(1, 8)), rows=64)
    one, eight = made.scaling
    assert one.speedup == 1.0 and 7.0 < eight.speedup < 8.0
    assert made.source == "layer profile" and made.names[0] == "b0"
