"""A layout: positions that share rows and positions that share parameters."""

import pytest

from synchromesh.values.layout import Layout, groups_of, leaf_layout_at, leaf_layouts, stages_of


def test_positions_as_a_picture() -> None:
    layout = Layout(data=2, tensor=3)
    lines = [[p for p in range(6) if layout.data_index(p) == d] for d in range(2)]
    assert lines == [[0, 1, 2], [3, 4, 5]]
    assert [layout.tensor_index(p) for p in range(6)] == [0, 1, 2, 0, 1, 2]
    assert layout.tensor_positions(4) == (3, 4, 5)
    assert layout.data_positions(4) == (1, 4)
    assert str(layout) == "2x3" and layout.devices == 6


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (4, 1), (1, 4), (2, 3)])
def test_lines_and_columns_meet_in_one_position(data: int, tensor: int) -> None:
    layout = Layout(data, tensor)
    for p in range(layout.devices):
        assert set(layout.tensor_positions(p)) & set(layout.data_positions(p)) == {p}
        assert len(layout.tensor_positions(p)) == tensor and len(layout.data_positions(p)) == data


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1: data\(0\) x tensor\(2\)"):
        Layout(0, 2)


def test_a_batch_lies_by_the_largest_data_degree() -> None:
    assert leaf_layouts([Layout(1, 4), Layout(2, 2)]) == {range(4): Layout(2, 2)}
    assert leaf_layouts([Layout(4, 1, recompute=True), Layout(2, 2)]) == {range(4): Layout(4, 1)}


def test_positions_are_counted_from_the_first_of_the_stage() -> None:
    layout = Layout(data=2, tensor=3, first=4)
    assert layout.positions == range(4, 10) and str(layout) == "2x3@4"
    assert [layout.data_index(p) for p in layout.positions] == [0, 0, 0, 1, 1, 1]
    assert layout.tensor_positions(8) == (7, 8, 9)
    assert layout.data_positions(8) == (5, 8)


def test_neighbours_on_the_same_devices_are_one_stage() -> None:
    one, two = Layout(2, 1), Layout(1, 2, first=2)
    chain = [one, Layout(1, 2), two, two, one, two]
    assert stages_of(chain) == (range(2), range(2, 4), range(4, 5), range(5, 6))
    assert groups_of(chain) == (0, 1, 0, 1)
    assert leaf_layout_at(leaf_layouts(chain), 3) == Layout(1, 2, first=2)
    assert stages_of([one]) == (range(1),)
    assert leaf_layouts(chain) == {range(2): Layout(2, 1), range(2, 4): Layout(1, 2, first=2)}


def test_a_layout_says_what_is_sharded_and_recomputed() -> None:
    assert str(Layout(4, 2, first=8)) == "4x2@8"
    assert str(Layout(4, 1, "optimizer")) == "4x1 zero1"
    assert str(Layout(2, 1, "parameters", recompute=True, first=2)) == "2x1@2 zero3 recomputed"
    assert str(Layout(1, 1, "parameters", recompute=True).mesh) == "1x1"
