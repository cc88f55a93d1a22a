"""Holdings: the boxes of each position tile a tensor, and who sums its gradient."""

from itertools import product
from math import prod

import pytest

from synchromesh.values.boxes import volume
from synchromesh.values.component import Parameter
from synchromesh.values.holding import Holding, holdings
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, REPLICATED_PARTIAL_GRADIENT, Placement, shard
from synchromesh.values.plan import Plan

WEIGHT = Parameter("weight", (12, 8), "float32")
PLACEMENTS = (REPLICATED, REPLICATED_PARTIAL_GRADIENT, shard(0), shard(1), shard(0, 3))


@pytest.mark.parametrize(
    ("placement", "degrees"), [*product(PLACEMENTS, [(1, 4), (2, 2), (4, 1), (1, 2)])]
)
def test_every_element_has_its_copies(placement: Placement, degrees: tuple[int, int]) -> None:
    held = Holding(WEIGHT, Layout(*degrees), placement)
    count: dict[tuple[int, int], int] = {}
    for position in range(held.layout.devices):
        boxes = held.boxes(position)
        assert sum(map(volume, boxes)) == held.local_shape[0] * held.local_shape[1]
        for (a, b), (c, d) in boxes:
            for entry in product(range(a, b), range(c, d)):
                count[entry] = count.get(entry, 0) + 1
    assert set(count.values()) == {held.copies} and len(count) == 12 * 8


def test_gradients_are_summed_where_parts_are_equal() -> None:
    """data x tensor = 2 x 2: positions 0 1 / 2 3."""
    layout = Layout(2, 2)
    assert Holding(WEIGHT, layout, shard(0)).gradient_positions(1) == (1, 3)
    assert Holding(WEIGHT, layout, REPLICATED).gradient_positions(2) == (0, 2)
    tied = Holding(WEIGHT, layout, REPLICATED_PARTIAL_GRADIENT)
    assert tied.partial_gradient and tied.gradient_positions(2) == (0, 1, 2, 3)


def test_workers_that_train_alone_sum_what_is_their_own() -> None:
    layout = Layout(2, 2)
    cut = Holding(WEIGHT, layout, shard(0), alone=True)
    assert cut.gradient_positions(1) == (1,) and cut.copies == 1
    assert cut.averaged and not cut.summed
    tied = Holding(WEIGHT, layout, REPLICATED_PARTIAL_GRADIENT, alone=True)
    assert tied.gradient_positions(2) == (2, 3) and tied.copies == tied.gradient_layout.data == 2
    assert tied.averaged and tied.summed
    buffer = Parameter("mean", (8,), "float32", trainable=False, buffer=True)
    placements = {("weight", layout): shard(0), ("mean", layout): REPLICATED}
    held = holdings([WEIGHT, buffer], placements, 4, Plan.parse("data; @synchronisation=local:2"))
    assert held["weight"].alone and not held["mean"].alone


@pytest.mark.parametrize(
    ("placement", "degrees"), [*product(PLACEMENTS, [(1, 4), (2, 2), (4, 1), (1, 2)])]
)
def test_the_layout_of_gradients_is_of_all_positions(
    placement: Placement, degrees: tuple[int, int]
) -> None:
    held = Holding(WEIGHT, Layout(*degrees), placement)
    groups = {held.gradient_positions(p) for p in range(held.layout.devices)}
    assert sorted(p for group in groups for p in group) == list(range(held.layout.devices))
    assert {len(group) for group in groups} == {held.gradient_layout.data}
    assert held.local_bytes == 4 * held.local_shape[0] * held.local_shape[1]


def test_a_tensor_of_several_layouts_or_of_none_is_at_home_everywhere() -> None:
    other = Parameter("other", (4,), "float32")
    tied = Parameter("tied", (6, 4), "float32")
    placements = {
        ("weight", Layout(2, 2)): shard(1),
        ("tied", Layout(2, 2)): shard(0),
        ("tied", Layout(4, 1)): REPLICATED,
    }
    held = holdings([WEIGHT, other, tied], placements, 4)
    assert held["weight"] == Holding(WEIGHT, Layout(2, 2), shard(1))
    assert held["other"].partial_gradient and held["tied"].partial_gradient
    assert held["tied"].boxes(3) == (((0, 6), (0, 4)),)


def test_stages_that_share_a_tensor_hold_it_alone_and_sum_its_gradient() -> None:
    """Stages on positions 0 1 | 2 3 | 4 5: `tied` is in the first and the last one."""
    tied, weight = Parameter("tied", (6, 4), "float32"), Parameter("weight", (4,), "float32")
    first, middle, last = (Layout(2, 1, first=p) for p in (0, 2, 4))
    placements = {
        ("tied", first): REPLICATED,
        ("tied", last): REPLICATED,
        ("weight", middle): REPLICATED,
    }
    held = holdings([tied, weight], placements, 6)
    assert held["tied"].partial_gradient and held["tied"].positions == (0, 1, 4, 5)
    assert [len(held["tied"].boxes(p)) for p in range(6)] == [1, 1, 0, 0, 1, 1]
    assert held["tied"].gradient_positions(4) == (0, 1, 4, 5) and held["tied"].copies == 4
    assert held["weight"] == Holding(weight, middle)
    assert [held["weight"].bytes_at(p) for p in range(6)] == [0, 0, 16, 16, 0, 0]
    assert held["weight"].gradient_positions(3) == (2, 3)


@pytest.mark.parametrize("shape", [(12, 8), (5, 7), (3, 64), (1, 9), (6,)])
@pytest.mark.parametrize("degrees", [(4, 1), (2, 2), (3, 2), (2, 1)])
@pytest.mark.parametrize("placement", [REPLICATED, REPLICATED_PARTIAL_GRADIENT, shard(0)])
def test_sharded_states_tile_what_is_computed_with(
    shape: tuple[int, ...], degrees: tuple[int, int], placement: Placement
) -> None:
    tensor, layout = Parameter("weight", shape, "float32"), Layout(*degrees)
    if not placement.fits(shape, layout.tensor):
        pytest.skip(f"{placement} does not fit {shape}")
    whole = Holding(tensor, layout, placement)
    held = Holding(tensor, layout, placement, states="optimizer")
    count: dict[tuple[int, ...], int] = {}
    for position in layout.positions:
        boxes = held.boxes(position)
        assert held.bytes_at(position) == 4 * sum(map(volume, boxes))
        assert held.bytes_at(position) <= held.part_bytes_at(position) <= held.kept_bytes
        for box in boxes:
            for entry in product(*(range(a, b) for a, b in box)):
                count[entry] = count.get(entry, 0) + 1
    assert set(count.values()) == {held.copies} and len(count) == prod(shape)
    assert held.copies * held.gradient_layout.data == whole.copies
    assert held.local_bytes == whole.local_bytes == whole.kept_bytes


def test_segments_of_a_sharded_tensor_are_cut_where_it_is_smallest() -> None:
    """A fused q-k-v weight over 2 x 2: two of six rows of each segment, of which one is kept."""
    fused = Parameter("qkv", (12, 3), "float32")
    held = Holding(fused, Layout(2, 2), shard(0, 3), states="parameters")
    assert held.boxes(0) == (((0, 2), (0, 3)), ((4, 5), (0, 3)))
    assert held.boxes(2) == (((5, 6), (0, 3)), ((8, 10), (0, 3)))


@pytest.mark.parametrize(
    ("tensor", "layouts", "states"),
    [
        (Parameter("w", (4,), "float32"), [Layout(2, 1, "optimizer")], "optimizer"),
        (Parameter("w", (4,), "float32"), [Layout(2, 1, "parameters"), Layout(2, 1)], "none"),
        (
            Parameter("w", (4,), "float32"),
            [Layout(2, 1, "parameters"), Layout(2, 1, "gradients", recompute=True)],
            "gradients",
        ),
        (Parameter("w", (), "float32"), [Layout(2, 1, "parameters")], "none"),
        (Parameter("w", (4,), "float32", False), [Layout(2, 1, "gradients")], "none"),
        (Parameter("w", (4,), "float32", False), [Layout(2, 1, "parameters")], "parameters"),
        (Parameter("b", (4,), "float32", False, True), [Layout(2, 1, "parameters")], "none"),
        (
            Parameter("w", (4,), "float32"),
            [Layout(2, 1, "parameters"), Layout(2, 1, "parameters", first=2)],
            "none",
        ),
    ],
)
def test_as_much_is_sharded_as_all_users_say(
    tensor: Parameter, layouts: list[Layout], states: str
) -> None:
    placements = {(tensor.name, layout): REPLICATED for layout in layouts}
    assert holdings([tensor], placements, 4)[tensor.name].states == states
