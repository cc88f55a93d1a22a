"""Strategies: the plans that a name stands for, each of them valid on its devices."""

import pytest

from synchromesh.study.strategy import NAMES, OURS, check, plans
from synchromesh.values.plan import Plan
from synchromesh.values.unsupported import unsupported


@pytest.mark.parametrize("name", [n for n in OURS if n != "auto"])
@pytest.mark.parametrize("devices", [4, 6, 8])
def test_plans_are_valid_and_use_all_devices(name: str, devices: int) -> None:
    found = plans(name, devices, 64)
    assert len(set(found)) == len(found) >= 1
    for text in found:
        plan = Plan.parse(text)
        assert not unsupported(plan)
        if name in ("pipeline", "hybrid"):
            assert plan.stage_count > 1 or plan.default.tensor > 1
            assert (devices // plan.stage_count) % (plan.default.tensor or 1) == 0


def test_the_families() -> None:
    assert plans("pipeline", 2, 64) == [f"pipeline:stages=2,microbatches={m}" for m in (2, 4, 8)]
    assert plans("pipeline", 4, 8) == [f"pipeline:stages=4,microbatches={m}" for m in (4, 8)]
    mixed = plans("hybrid", 4, 8)
    assert mixed[0] == "hybrid:tensor=2" and "pipeline:stages=2,tensor=2,microbatches=4" in mixed
    assert not any("stages=4" in text or "tensor=4" in text for text in mixed)


def test_workers_that_train_alone_are_every_data_index() -> None:
    assert plans("local", 4, 64) == ["data; @synchronisation=local:8"]
    assert Plan.parse(*plans("diloco", 4, 64)).sync.steps == 50


def test_compressed_gradients_are_data_parallelism() -> None:
    assert plans("int8", 4, 64) == ["data; @compression=int8"]
    assert plans("powersgd", 4, 64) == ["data; @compression=powersgd:4"]


@pytest.mark.parametrize(
    ("name", "devices", "said"),
    [
        ("hybrid", 2, "hybrid needs at least 4 devices, there are 2"),
        ("hybrid", 5, "hybrid needs a number of devices that can be divided, and 5 is a prime"),
        ("pipeline", 65, "65 devices are as many stages, there are 64 rows"),
    ],
)
def test_where_there_is_no_such_plan_it_says_what_is_missing(
    name: str, devices: int, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        plans(name, devices, 64)


def test_what_is_no_strategy_is_refused_with_the_nearest() -> None:
    for name in (*NAMES, "data; classifier=tensor"):
        check(name)
    with pytest.raises(ValueError, match=r"'dpd' is no strategy.*ddp.*choose of single, data"):
        check("dpd")
    check("sharded-data")
    check("pipeline:stages=2; @schedule=zero-bubble")
    with pytest.raises(ValueError, match="sums that come late"):
        check("zero1; @synchronisation=stale:1")
