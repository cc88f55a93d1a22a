"""Curves, patterns and the document of a profile: laws, a round trip, strict reading."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchromesh.values.layout import Layout
from synchromesh.values.profile import (
    BurstSpeed,
    Calls,
    Compute,
    Curve,
    DeviceModel,
    Memory,
    Overlap,
    Pattern,
    Profile,
)

SIZES = st.floats(0, 1e9, allow_nan=False)
SECONDS = st.floats(0, 1e3, allow_nan=False)
POINTS = st.lists(st.tuples(SIZES, SECONDS), min_size=1, max_size=6)


def test_a_curve_is_lines_through_its_points() -> None:
    curve = Curve(((10.0, 1.0), (20.0, 3.0), (40.0, 4.0)))
    at = {0: 0.0, 5: 0.0, 10: 1.0, 15: 2.0, 20: 3.0, 30: 3.5, 40: 4.0, 80: 6.0}
    assert {x: curve(x) for x in at} == at  # 0: the line would be at -1
    assert Curve(((4.0, 2.0),))(6) == 3.0  # one point: through the origin
    assert Curve(((0.0, 7.0),))(6) == 7.0
    assert curve.scaled(2.0)(30) == 7.0


@given(POINTS, SIZES, SIZES)
def test_more_takes_no_less_time(points: list[tuple[float, float]], a: float, b: float) -> None:
    curve = Curve.of(points)
    lower, upper = sorted((a, b))
    assert 0 <= curve(lower) <= curve(upper) * (1 + 1e-9) + 1e-9


def test_of_several_points_of_one_size_the_highest_counts() -> None:
    assert Curve.of([(2.0, 5.0), (1.0, 3.0), (2.0, 4.0), (3.0, 1.0)]).points == (
        (1.0, 3.0), (2.0, 5.0), (3.0, 5.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    "points",
    [
        (), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0)), ((-1.0, 1.0),), ((1.0, -1.0),),
        ((1.0, float("inf")),), ((1.0, float("nan")),), ((float("nan"), 1.0),),
        ((1.0, 1.0), (float("inf"), 2.0)),
    ],
)  # fmt: skip
def test_wrong_curves(points: Any) -> None:
    with pytest.raises(ValueError, match="a curve needs"):
        Curve(points)


def drawn(pattern: Pattern, devices: int) -> str:
    return " ".join("".join(map(str, group)) for group in pattern.groups(devices))


@pytest.mark.parametrize(
    ("size", "stride", "devices", "groups"),
    [
        (2, 1, 4, "01 23"),
        (2, 2, 4, "02 13"),
        (2, 2, 8, "02 13 46 57"),
        (2, 3, 6, "03 14 25"),
        (3, 2, 6, "024 135"),
        (2, 1, 5, "01 23 4"),
        (2, 2, 6, "02 13 4 5"),
        (1, 1, 3, "0 1 2"),
        (6, 1, 6, "012345"),
        (4, 1, 3, "0 1 2"),
    ],
)
def test_groups_of_a_pattern(size: int, stride: int, devices: int, groups: str) -> None:
    assert drawn(Pattern(size, stride), devices) == groups


@pytest.mark.parametrize(
    ("stride", "devices", "rounds"),
    [
        (1, 2, "01"),
        (1, 4, "01 23, 12"),
        (2, 4, "02 13"),
        (2, 8, "02 13 46 57, 24 35"),
        (3, 4, "03"),  # a skip over two stages, or stages of 3 ranks and one
        (1, 3, "01, 12"),
        (2, 5, "02 13, 24"),
        (4, 4, ""),
    ],
)
def test_pairs_of_a_pattern(stride: int, devices: int, rounds: str) -> None:
    found = Pattern(2, stride).pairs(devices)
    texts = (" ".join("".join(map(str, pair)) for pair in pairs) for pairs in found)
    assert ", ".join(texts) == rounds


@given(st.integers(1, 9), st.integers(1, 12))
def test_every_distance_is_gone_once_and_no_position_talks_to_two(
    stride: int, devices: int
) -> None:
    rounds = Pattern(2, stride).pairs(devices)
    every = sorted(pair for pairs in rounds for pair in pairs)
    assert every == [(p, p + stride) for p in range(devices - stride)]
    for pairs in rounds:
        positions = [p for pair in pairs for p in pair]
        assert len(set(positions)) == len(positions)


@given(st.integers(1, 4), st.integers(1, 4))
def test_the_lines_and_columns_of_a_layout_are_patterns(data: int, tensor: int) -> None:
    layout = Layout(data, tensor)
    positions = range(layout.devices)
    lines = {layout.tensor_positions(p) for p in positions}
    columns = {layout.data_positions(p) for p in positions}
    assert set(Pattern(tensor).groups(layout.devices)) == lines
    assert set(Pattern(data, tensor).groups(layout.devices)) == columns


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (1.1, 1.0), (float("nan"), 1.0)])
def test_rates_of_overlap(rates: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="rates of overlap"):
        Overlap(*rates)


def test_a_delay_is_a_time() -> None:
    with pytest.raises(ValueError, match="number of seconds"):
        Overlap(delay=-0.1)


@pytest.mark.parametrize("burst", [(0.9, 0.0), (1.0, -0.1), (float("nan"), 0.0)])
def test_a_burst_is_no_slowdown(burst: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no slowdown"):
        BurstSpeed(*burst)


CURVE = Curve(((1.0, 0.5), (2.0, 0.75)))
FULL = Profile(
    devices=2,
    compute={
        "a": Compute(
            (CURVE, CURVE), (CURVE,), Memory(CURVE, CURVE, CURVE, CURVE, (0,), (1, 2)), 0.1
        )
    },
    network={
        ("all_reduce", Pattern(2)): CURVE,
        ("all_gather", Pattern(2, 2)): CURVE,
        ("send", Pattern(2, 3)): CURVE,
    },
    overlap={"all_reduce": Overlap(0.5, 0.25, 0.001)},
    device=DeviceModel(BurstSpeed(2.0, 0.01), (2.5, 2.0)),
    update_byte=1e-9,
    update_tensor=1e-6,
    copy_byte=1e-10,
    state_factor=2.0,
    work_largest=2.0,
    work_byte=0.5,
    calls=Calls(4e-6, -15e-6, 1e-5, 2e-5, 5e-4),
    host=1e-3,
    source="measured here",
    seconds=1.5,
    emulated=True,
    missing=("b (1x2): out of memory",),
)


def test_calls() -> None:
    assert FULL.calls.scaled(2.0) == Calls(8e-6, -30e-6, 2e-5, 4e-5, 1e-3)


def test_round_trip(tmp_path: Path) -> None:
    for profile in (FULL, Profile(1)):
        assert Profile.from_dict(json.loads(profile.to_json())) == profile
    path = tmp_path / "profile.json"
    path.write_text(FULL.to_json())
    assert Profile.load(path) == FULL


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document of FULL with one key of it set, or taken away (...)."""
    document: dict[str, Any] = copy.deepcopy(FULL.to_dict())
    *way, last = [int(k) if k.isdigit() else k for k in path.split(".")]
    place: Any = document
    for key in way:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("devices", 0, "doc: devices: should be from 1"),
        ("devices", ..., "doc: devices is missing"),
        ("speed", 1, "doc: unknown key 'speed'"),
        ("compute", [], "doc: compute: should be a mapping"),
        ("compute.a", [], "doc: compute.a: should be a mapping"),
        ("compute.a.forward", [], "doc: compute.a: forward and backward should have a curve"),
        (
            "compute.a.forward.0.0",
            [1],
            r"doc: compute.a.forward\[0\]\[0\]: should be \[size, value\]",
        ),
        ("compute.a.forward.0.0", [3, 1], r"doc: compute.a.forward\[0\]: a curve needs ascending"),
        ("compute.a.forward.0.0", ["1", 1], r"doc: compute.a.forward\[0\]: should be a number"),
        (
            "compute.a.memory.kept_inputs",
            [-1],
            r"doc: compute.a.memory.kept_inputs\[0\]: should be from 0",
        ),
        ("network.0.kind", "gossip", r"doc: network\[0\].kind: 'gossip' is none of all_reduce"),
        ("network.0.size", ..., r"doc: network\[0\]: size is missing"),
        ("network.0", FULL.to_dict()["network"][1], r"doc: network\[1\]: all_reduce of size 2"),
        ("overlap.gossip", {}, "doc: overlap: unknown key 'gossip'"),
        ("overlap.all_reduce.compute", 1.5, "doc: overlap.all_reduce: rates of overlap"),
        ("sprint", {}, "doc: sprint: speed, credit is missing"),
        ("sprint.speed", 0.5, "doc: sprint: a burst is no slowdown"),
        ("update.state_factor", ..., "doc: update: state_factor is missing"),
        ("update.state_factor", -1, "doc: update.state_factor: should be at least 0"),
        ("calls.step", ..., "doc: calls: step is missing"),
        ("calls.begin_forward", -1e-6, "doc: calls.begin_forward: should be at least 0"),
        ("calls.backward", None, "doc: calls.backward: should be a number"),
        ("emulated", 1, "doc: emulated: should be true or false"),
        ("missing", [1], r"doc: missing\[0\]: should be text"),
    ],
)
def test_strict_reading(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        Profile.from_dict(changed(path, value), "doc")
    assert str(caught.value).count("doc") == 1, "the document is named once"


def test_joined_curves_have_the_sizes_of_both_and_the_newer_seconds() -> None:
    old, new = Curve(((1.0, 1.0), (4.0, 4.0))), Curve(((4.0, 5.0), (16.0, 20.0)))
    both = old.joined(new)
    assert both.points == ((1.0, 1.0), (4.0, 5.0), (16.0, 20.0)) and both.reach == 16.0
    compute = FULL.compute["a"]
    assert compute.joined(compute) == compute


def test_slowdowns_are_in_proportion_to_what_ranks_take() -> None:
    slow = Curve(((1.0, 3.0),))
    fast = Curve(((1.0, 1.0),))
    profile = Profile(2, {"a": Compute((fast, slow), (fast, slow), Memory())})
    assert profile.relative_slowdowns == pytest.approx((1.0, 3.0))
    assert Profile(2).relative_slowdowns == ()


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.5, 100))
def test_slower_links_cost_processors_no_more(a: float, b: float, times: float) -> None:
    before = Overlap(a, b, 0.001)
    same = before.stretched(1.0)
    assert [same.compute, same.network] == pytest.approx([a, b]) and same.delay == before.delay
    after = before.stretched(times)
    assert (1 / after.network - 1) * times == pytest.approx(1 / b - 1), (
        "traffic waits as long as before"
    )
    if after.compute > Overlap.LEAST_RATE:
        taken = (1 - after.compute) / after.network * times
        assert taken == pytest.approx((1 - a) / b), "and takes as much of processors"
    assert before.stretched(1e9).compute == pytest.approx(1, abs=1e-6)
