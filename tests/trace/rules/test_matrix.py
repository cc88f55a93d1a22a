"""Matrix products, attention and softmax: every choice against the whole operator."""

import pytest
import torch

from tests.rule_law import check, local_graphs
from tests.threads import join, part

aten = torch.ops.aten


def t(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


@pytest.mark.parametrize("m", [2, 3])
def test_linear(m: int) -> None:
    found = check(aten.linear.default, (t(5, 7, 12), t(24, 12), t(24)), m=m)
    assert {"r, S(0), S(0) -> S(2)", "S(2), S(1), P -> P"} <= found
    found = check(aten.linear.default, (t(12, 6), t(12, 6)), m=m)
    assert {"r, S(0) -> S(1)", "S(1), S(1) -> P", "S(0), r -> S(0)"} <= found


@pytest.mark.parametrize("m", [2, 3, 5, 8])
def test_linear_that_does_not_divide(m: int) -> None:
    found = check(aten.linear.default, (t(7, 13), t(7, 13), t(7)), m=m)
    assert {"r, S(0), S(0) -> S(1)", "S(1), S(1), P -> P", "S(0), r, r -> S(0)"} <= found


def test_fewer_entries_than_ranks() -> None:
    found = check(aten.linear.default, (t(4, 3), t(2, 3), t(2)), m=5)
    assert {"r, S(0), S(0) -> S(1)", "S(1), S(1), P -> P"} <= found
    assert not any("S(" in x for x in check(aten.mm.default, (t(1, 1), t(1, 1)), m=2))


def test_frozen_weight_needs_no_partial_gradient() -> None:
    found = check(aten.linear.default, (t(6, 4), t(4, 4, grad=False), t(4, grad=False)), m=2)
    assert {"r, S(0), S(0) -> S(1)", "S(0), R, R -> S(0)", "S(1), S(1), P -> P"} <= found


def test_addmm() -> None:
    found = check(aten.addmm.default, (t(8), t(6, 4), t(4, 8)), m=2)
    assert {"S(0), r, S(1) -> S(1)", "P, S(1), S(0) -> P"} <= found


@pytest.mark.parametrize(
    ("a", "b"), [((4, 6, 8), (4, 8, 10)), ((2, 4, 6, 8), (8, 2)), ((4, 1, 6, 8), (6, 8, 4))]
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    check(aten.matmul.default, (t(*a), t(*b)), m=2)


def test_matmul_forms() -> None:
    assert "S(0), S(0) -> S(0)" in check(aten.bmm.default, (t(4, 6, 8), t(4, 8, 2)), m=2)
    assert "S(1), S(0) -> P" in check(aten.mm.default, (t(6, 8), t(8, 4)), m=4)
    check(aten.baddbmm.default, (t(4, 6, 2), t(4, 6, 8), t(4, 8, 2)), m=2)
    check(
        aten.baddbmm.default, (t(4, 1, 2), t(4, 6, 8), t(4, 8, 2)), {"beta": 0.5, "alpha": 2}, m=2
    )


def test_einsum() -> None:
    found = check(aten.einsum.default, ("bhid,bhjd->bhij", [t(2, 4, 6, 8), t(2, 4, 2, 8)]), m=2)
    assert {"S(1), S(1) -> S(1)", "S(3), S(3) -> P", "S(2), r -> S(2)"} <= found


def test_ranks_that_share_scores_drop_the_same_of_them() -> None:
    """By values' own dim every rank has all scores; by heads and queries each has its own."""
    q, k, v = (torch.randn(3, 4, 8, 4, dtype=torch.float64) for _ in range(3))
    whole = (q, k, v, None, 0.5)
    op = aten.scaled_dot_product_attention.default
    torch.manual_seed(5)
    expected = op(*whole)
    apart = {}
    for choice, module in local_graphs(op, whole, m=2):
        parts = []
        for rank in range(2):
            inputs = [
                part(x, s, 2, rank) if s.sharded else x
                for x, s in zip((q, k, v), choice.inputs, strict=True)
            ]
            torch.manual_seed(7 + rank if choice.draws_apart else 5)
            parts.append(module(None, *inputs))
        (state,) = choice.outputs
        if state.sharded and not choice.draws_apart:
            torch.testing.assert_close(join(parts, state), expected)
        if state.sharded:
            apart[str(state)] = choice.draws_apart
    assert apart == {"S(0)": True, "S(1)": True, "S(2)": True, "S(3)": False}


@pytest.mark.parametrize("m", [2, 4])
def test_attention_by_heads(m: int) -> None:
    q, k, v = (t(3, 4, 8, 4) for _ in range(3))
    found = check(aten.scaled_dot_product_attention.default, (q, k, v), m=m)
    assert {"S(1), S(1), S(1) -> S(1)", "S(2), r, r -> S(2)", "r, r, S(3) -> S(3)"} <= found
    found = check(aten.scaled_dot_product_attention.default, (q, k, v, None, 0.0, True), m=m)
    assert "S(2), r, r -> S(2)" not in found, "causal masks count positions from the start"


@pytest.mark.parametrize("shape", [(3, 1, 8, 8), (3, 4, 8, 8), (8, 8), (1, 4, 1, 8)])
def test_attention_mask(shape: tuple[int, ...]) -> None:
    q, k, v = (t(3, 4, 8, 4) for _ in range(3))
    found = check(aten.scaled_dot_product_attention.default, (q, k, v, t(*shape)), m=2)
    mask = "S(1)" if len(shape) == 4 and shape[1] == 4 else "r"
    assert f"S(1), S(1), S(1), {mask} -> S(1)" in found


def test_grouped_queries() -> None:
    q, k, v = t(2, 8, 5, 4), t(2, 2, 5, 4), t(2, 2, 5, 4)
    flag = {"enable_gqa": True}
    assert "S(1), S(1), S(1) -> S(1)" in check(
        aten.scaled_dot_product_attention.default, (q, k, v), flag, m=2
    )
    assert "S(1), r, r -> S(1)" in check(
        aten.scaled_dot_product_attention.default, (q, k, v), flag, m=4
    )


@pytest.mark.parametrize(("heads", "m"), [(6, 4), (3, 2), (3, 5)])
def test_heads_that_do_not_divide(heads: int, m: int) -> None:
    q, k, v = (t(2, heads, 4, 6) for _ in range(3))
    for learned in (False, True):
        mask = t(heads, 1, 4, grad=learned)
        found = check(aten.scaled_dot_product_attention.default, (q, k, v, mask), m=m)
        assert ("S(1), S(1), S(1), S(0) -> S(1)" in found) == (heads >= m or not learned)
    found = check(aten.matmul.default, (q, t(2, heads, 6, 4)), m=m)
    assert "S(1), S(1) -> S(1)" in found


@pytest.mark.parametrize(
    ("heads", "groups", "m", "expected"),
    [
        (6, 3, 2, {"S(1, 1, 2), S(1), S(1) -> S(1, 1, 2)", "S(1), r, r -> S(1)"}),
        (6, 3, 5, {"S(1, 1, 2), S(1), S(1) -> S(1, 1, 2)", "S(1), r, r -> S(1)"}),
        (14, 2, 4, {"S(1, 1, 7), S(1), S(1) -> S(1, 1, 7)", "S(1), r, r -> S(1)"}),
        (4, 2, 3, {"S(1), r, r -> S(1)"}),
    ],
)
def test_grouped_queries_that_do_not_divide(
    heads: int, groups: int, m: int, expected: set[str]
) -> None:
    q, k, v = t(2, heads, 5, 4), t(2, groups, 5, 4), t(2, groups, 5, 4)
    flag = {"enable_gqa": True}
    op = aten.scaled_dot_product_attention.default
    assert expected <= check(op, (q, k, v), flag, m=m)
    mask = t(2, heads, 5, 5)
    assert any("S(1), r, r, S(1) -> " in x for x in check(op, (q, k, v, mask), flag, m=m))


def test_softmax() -> None:
    assert check(aten.softmax.int, (t(4, 6, 8), -1), m=2) >= {"S(0) -> S(0)", "S(1) -> S(1)"}
    assert "S(2) -> S(2)" not in check(aten.log_softmax.int, (t(4, 6, 8), 2), m=2)
