"""Stages of layer profiles: those of PipeDream's paper come out of the search."""

import pytest

from synchromesh import catalogue
from synchromesh.planning.layer_profile import load, parse
from synchromesh.planning.layers import LayerPlanned, plan_layers
from synchromesh.values.plan import Plan
from tests.planning.test_layer_profile import node
from tests.published import published

# as VGG in small: much work and large values first, many parameters last
TWO_KINDS = "\n".join(
    [
        *(node(f"node{i}", "Conv2d()", 40.0, 80.0, 40e6, 4e6) for i in (1, 2, 3)),
        node("node4", "Pool2d()", 1.0, 1.0, 4e6, 0.0),
        node("node5", "Linear(in_features=1, out_features=4096)", 4.0, 8.0, 128 * 16384, 400e6),
        *(f"\tnode{i} -- node{i + 1}" for i in (1, 2, 3, 4)),
    ]
)


def planned(text: str, cluster: str, **other: float) -> LayerPlanned:
    profile = parse(text)
    assert profile.rows == 128
    return plan_layers(profile, catalogue.cluster(cluster), 128, **other)  # type: ignore[arg-type]


def test_a_slow_network_parts_work_from_parameters() -> None:
    slow = planned(TWO_KINDS, "v100-pciex8").candidates[0]
    assert [(s.end - s.first, s.devices) for s in slow.stages] == [(4, 7), (1, 1)]
    assert [s.first for s in slow.plan.stages] == ["node1", "node5"]
    assert slow.gap == 0.0
    assert len(slow.memory) == len(slow.stage_seconds) == 2
    quick = planned(TWO_KINDS, "v100x8").candidates[0]
    assert len(quick.stages) == 1


def test_both_kinds_of_plans_are_told() -> None:
    made = planned(TWO_KINDS, "v100-pciex8")
    assert {len(c.stages) > 1 for c in made.candidates} == {True, False}
    assert made.rows == 8 * 128
    told = made.to_dict()
    assert told["chosen"] == str(made.plan) == told["candidates"][0]["plan"]
    assert Plan.parse(told["chosen"]) == made.plan
    stages = told["candidates"][0]["stages"]
    assert [n for s in stages for n in s["layers"]] == [f"node{i}" for i in (1, 2, 3, 4, 5)]
    assert sum(s["devices"] for s in stages) == told["devices"] == 8


def test_memory_that_no_stage_keeps_to() -> None:
    assert "node5, needs 1.2 GB" in planned(TWO_KINDS, "v100-pciex8", memory=1e9).refusal
    for limits in ({"memory": 1.22e9, "headroom": "0%"}, {"memory": 1.343e9}):
        tight = planned(TWO_KINDS, "v100x8", **limits)
        assert len(tight.candidates[0].stages) > 1
        assert max(m.peak for m in tight.candidates[0].memory) <= 1.22e9
    message = r"no stages fit 8 devices, of which plans may use 900\.0 MB each"
    with pytest.raises(ValueError, match=message):
        _ = planned(TWO_KINDS, "v100-pciex8", memory=1e9, headroom="10%").plan


def test_one_device_has_one_stage() -> None:
    assert str(planned(TWO_KINDS, "v100x1").plan).startswith("single")


@pytest.mark.parametrize(
    ("model", "cluster", "shape"),
    [
        ("vgg16", "v100-pciex16", [15, 1]),  # cluster A, PipeDream's Table 1
        ("resnet50", "v100x16", [16]),  # cluster B
    ],
)
def test_the_structures_of_the_paper(model: str, cluster: str, shape: list[int]) -> None:
    profile = load(published(f"pipedream/{model}.graph.txt"))
    best = plan_layers(profile, catalogue.cluster(cluster), 128).candidates[0]
    assert [s.devices for s in best.stages] == shape
    if len(shape) > 1:
        kinds = [
            {x.description.partition("(")[0] for x in profile.layers[s.first : s.end]}
            for s in best.stages
        ]
        assert "Linear" not in kinds[0]
        assert "Conv2d" not in kinds[1]
