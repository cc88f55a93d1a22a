"""Views, slices and concatenation: every choice against the whole operator; where shards go,
drawn."""

import pytest
import torch

from synchromesh.trace.rules.views import through
from synchromesh.values.placement import parse
from tests.rule_law import check

aten = torch.ops.aten


def t(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize(
    ("source", "state", "target", "expected"),
    [
        ((5, 24), "S(1)", (5, 4, 6), "S(1)"),
        ((5, 4, 6), "S(1)", (5, 24), "S(1)"),
        ((5, 24), "S(1, 3)", (5, 3, 8), "S(2)"),
        ((5, 3, 4, 2), "S(2)", (5, 24), "S(1, 3)"),
        ((5, 4, 6), "S(2)", (5, 24), "S(1, 4)"),
        ((5, 6), "S(1)", (5, 2, 3), "S(1)"),
        ((5, 6), "S(1)", (5, 3, 2), None),  # the halves of 6 do not end where a row of 2 does
        ((5, 1, 6), "S(2)", (5, 6, 1), "S(1)"),
        ((4, 6), "S(0)", (24,), "S(0)"),
        ((5, 12), "S(1, 1, 4)", (5, 3, 4), "S(1)"),
        ((5, 36), "S(1, 3, 4)", (5, 3, 3, 4), "S(2)"),
        ((5, 3, 1, 4), "S(1)", (5, 12), "S(1, 1, 4)"),
        ((5, 3, 2, 4), "S(1)", (5, 6, 4), "S(1, 1, 2)"),
        ((5, 12), "S(1, 1, 4)", (5, 6, 2), "S(1, 1, 2)"),
        ((5, 15), "S(1)", (5, 3, 5), None),  # 8 and 7 entries end within a row of 5
        ((5, 3, 4), "S(1)", (60,), "S(0, 5, 4)"),
    ],
)
def test_through_a_view(source: tuple, state: str, target: tuple, expected: str | None) -> None:
    found = through(source, target, parse(state), 2)
    assert (None if found is None else str(found)) == expected
    if found is not None:
        assert through(target, source, found, 2) == parse(state), "and back"


@pytest.mark.parametrize("m", [2, 3])
def test_reshape(m: int) -> None:
    assert "S(1) -> S(1)" in check(aten.view.default, (t(5, 24), [5, 6, 4]), m=m)
    assert "S(1) -> S(1)" in check(aten.view.default, (t(5, 24), [5, -1, 4]), m=m)
    assert "S(1) -> S(1)" in check(aten.reshape.default, (t(5, 6, 4), [-1, 24]), m=m)
    assert "S(1, 3) -> S(2)" in check(aten.reshape.default, (t(5, 36), [5, 3, 12]), m=m)
    assert "S(0) -> S(0)" in check(aten.flatten.using_ints, (t(6, 4, 2), 0, 1), m=m)
    assert "S(1) -> S(1)" in check(aten.unflatten.int, (t(5, 24), 1, [6, 4]), m=m)
    check(aten.unflatten.int, (t(5, 24), -1, [-1, 4]), m=m)


@pytest.mark.parametrize("m", [2, 5])
def test_heads_through_a_view(m: int) -> None:
    assert "S(1, 1, 4) -> S(1)" in check(aten.view.default, (t(2, 12), [2, 3, 4]), m=m)
    assert "S(1, 3, 4) -> S(2)" in check(aten.view.default, (t(2, 36), [2, 3, 3, 4]), m=m)
    assert "S(1) -> S(1, 1, 4)" in check(aten.reshape.default, (t(2, 3, 4), [2, 12]), m=m)
    assert "S(1) -> S(1, 1, 4)" in check(aten.flatten.using_ints, (t(2, 3, 4), 1, 2), m=m)
    assert "S(1, 1, 4) -> S(1)" in check(aten.unflatten.int, (t(2, 12), 1, [3, 4]), m=m)
    check(aten.reshape.default, (t(2, 3, 4), [-1, 12]), m=m)
    check(aten.reshape.default, (t(2, 3, 4), [2, -1]), m=m)
    found = check(aten.repeat_interleave.self_int, (t(2, 3), 4, 1), m=m)
    assert "S(1) -> S(1, 1, 4)" in found
    assert "S(1) -> S(1, 2)" in check(aten.repeat.default, (t(2, 3), [1, 2]), m=m)
    assert "r -> S(1)" in check(aten.expand.default, (t(2, 1, 4), [2, 3, 4]), m=m)
    assert "S(1, 3) -> S(1), S(1), S(1)" in check(aten.chunk.default, (t(2, 21), 3, 1), m=m)
    assert "S(1), S(1) -> S(1, 2)" in check(aten.cat.default, ([t(2, 3), t(2, 3)], 1), m=m)


def test_permutations() -> None:
    x = t(4, 6, 8)
    assert "S(2) -> S(0)" in check(aten.permute.default, (x, [2, 0, 1]), m=2)
    assert "S(1) -> S(2)" in check(aten.transpose.int, (x, -1, 1), m=2)
    assert "S(0) -> S(1)" in check(aten.t.default, (t(4, 6),), m=2)
    assert "S(2) -> S(3)" in check(aten.unsqueeze.default, (x, 1), m=2)
    assert "S(2) -> S(2)" in check(aten.unsqueeze.default, (x, -1), m=2)
    assert "S(2) -> S(1)" in check(aten.squeeze.dim, (t(4, 1, 8), 1), m=2)
    assert "S(2) -> S(1)" in check(aten.squeeze.default, (t(4, 1, 8),), m=2)
    assert "S(0) -> S(2)" in check(aten.movedim.int, (x, 0, 2), m=2)
    assert "S(0) -> S(1)" in check(aten.movedim.int, (x, -1, 0), m=2)


def test_expand_makes_new_dims_in_parts() -> None:
    found = check(aten.expand.default, (t(6, 1, 4), [6, 8, 4]), m=2)
    assert {"S(0) -> S(0)", "r -> S(1)", "S(2) -> S(2)", "P -> P"} <= found
    assert "r -> S(0)" in check(aten.expand.default, (t(1, 4), [2, 3, 4]), m=2)
    check(aten.expand.default, (t(6, 1, 4), [-1, 8, -1]), m=2)


def test_parts() -> None:
    x = t(4, 6, 8)
    assert "S(2) -> S(1)" in check(aten.select.int, (x, 1, 2), m=2)
    assert "S(0) -> S(0)" in check(aten.select.int, (x, -1, 2), m=2)
    assert "S(1) -> S(1)" not in check(aten.slice.Tensor, (x, 1, 1, 5), m=2)
    assert "S(1) -> S(1)" in check(aten.slice.Tensor, (x, 1, 0, 2**63 - 1), m=2)
    check(aten.slice.Tensor, (x, 1, 0, 6), m=2)
    check(aten.narrow.default, (x, 2, 1, 4), m=2)
    assert "S(2) -> S(1), S(1), S(1), S(1)" in check(aten.unbind.int, (x, 0), m=2)


def test_split_of_a_fused_weight() -> None:
    x = t(5, 24)
    assert "S(1, 3) -> S(1), S(1), S(1)" in check(aten.split.Tensor, (x, 8, -1), m=2)
    assert "S(1, 3) -> S(1), S(1), S(1)" in check(aten.chunk.default, (x, 3, 1), m=4)
    found = check(aten.split_with_sizes.default, (t(5, 24), [16, 4, 4], 1), m=2)
    assert "S(1, 6) -> S(1, 4), S(1), S(1)" in found
    check(aten.split.Tensor, (t(5, 20), 8, -1), m=2)
    check(aten.split.Tensor, (t(6, 20), 4, -1), m=2)


def test_tensor_split_counts_the_entries_of_a_shard() -> None:
    """Places in the whole are others in a part of it."""
    x = t(5, 24)
    assert "S(1, 3) -> S(1), S(1), S(1)" in check(aten.tensor_split.indices, (x, [8, 16], 1), m=2)
    found = check(aten.tensor_split.indices, (x, [4, -16], -1), m=2)
    assert "S(1, 6) -> S(1), S(1), S(1, 4)" in found
    assert "S(1, 3) -> S(1), S(1), S(1)" in check(aten.tensor_split.sections, (x, 3, 1), m=2)
    check(aten.tensor_split.sections, (x, 5, 1), m=2)
    check(aten.tensor_split.indices, (x, [16, 8], 1), m=2)


def test_a_squeeze_names_its_dims() -> None:
    """A part of a dim of two may have one entry, which is not to be taken away."""
    assert "S(0) -> S(0)" in check(aten.squeeze.default, (t(2, 1, 3),), m=2)
    assert "S(1) -> S(1)" in check(aten.squeeze.dim, (t(3, 2, 1), 1), m=2)
    assert "S(2) -> S(1)" in check(aten.squeeze.dims, (t(1, 3, 2), [0, 2]), m=2)


def test_cat_in_segments() -> None:
    assert "S(1), S(1) -> S(1, 2)" in check(aten.cat.default, ([t(3, 4), t(3, 4)], 1), m=2)
    assert "S(1, 2), S(1) -> S(1, 3)" in check(aten.cat.default, ([t(3, 8), t(3, 4)], -1), m=2)
    assert "S(0), S(0) -> S(0)" in check(aten.cat.default, ([t(4, 3), t(4, 5)], 1), m=2)
    assert "S(1), S(1) -> S(2)" in check(aten.stack.default, ([t(3, 4), t(3, 4)], 1), m=2)


def test_tiles_rolls_and_pads() -> None:
    assert "S(1) -> S(1, 3)" in check(aten.repeat.default, (t(3, 4), [1, 3]), m=2)
    assert "S(1) -> S(2)" in check(aten.repeat.default, (t(3, 4), [2, 1, 1]), m=2)
    assert "S(1) -> S(1)" in check(aten.repeat_interleave.self_int, (t(3, 4), 2, 1), m=2)
    assert check(aten.roll.default, (t(4, 6, 8), [1, -2], [0, 1]), m=2) >= {
        "S(2) -> S(2)",
        "P -> P",
    }
    assert "S(1) -> S(1)" not in check(aten.roll.default, (t(4, 6), [1], [1]), m=2)
    found = check(aten.pad.default, (t(4, 6, 8), [1, 2]), m=2)
    assert {"S(0) -> S(0)", "P -> P"} <= found and not any(x.startswith("S(2)") for x in found)
    assert "P -> P" not in check(aten.constant_pad_nd.default, (t(4, 6), [1, 2], 1.5), m=2)
    check(aten.tril.default, (t(4, 6, 6),), m=2)
    check(aten.flip.default, (t(4, 6, 6), [1]), m=2)
