"""Elementwise operators, norms, convolutions, embeddings, reductions, losses: every choice
against the whole."""

from collections.abc import Callable

import pytest
import torch

from synchromesh.trace.rules.indexing import embedding_bag_of_part, embedding_of_part
from synchromesh.trace.rules.loss import cross_entropy_of_part
from tests.rule_law import check
from tests.threads import ThreadAxis, ThreadGroup, spin

aten = torch.ops.aten


def t(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_(grad)


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 6, 8), (4, 6, 8)),
        ((4, 6, 8), (8,)),
        ((4, 1, 8), (4, 6, 1)),
        ((6, 8), (4, 1, 1)),
        ((4,), ()),
    ],
)
def test_broadcasting(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    assert "P, P -> P" in check(aten.add.Tensor, (t(*a), t(*b)), m=2)
    assert "P, r -> P" in check(aten.mul.Tensor, (t(*a), t(*b)), m=2)
    check(aten.div.Tensor, (t(*a), t(*b) + 3), m=2)
    check(aten.sub.Tensor, (t(*a), t(*b)), {"alpha": 2}, m=2)
    check(aten.maximum.default, (t(*a), t(*b)), m=2)


def test_unary() -> None:
    for op in (
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.tanh,
        aten.exp,
        aten.sigmoid,
        aten.neg,
        aten.hardswish,
    ):
        found = check(op.default, (t(4, 6),), m=2)
        assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= found
        assert ("P -> P" in found) == (op is aten.neg)
    assert "P -> P" in check(aten.mul.Tensor, (t(4, 6), 2.5), m=2)
    assert "P -> P" not in check(aten.add.Tensor, (t(4, 6), 2.5), m=2)
    assert "P -> P" not in check(aten.pow.Tensor_Scalar, (t(4, 6), 2), m=2)
    assert "P -> P" in check(aten.to.dtype, (t(4, 6), torch.float64), m=2)
    assert "P -> P" not in check(
        aten.div.Scalar_mode, (t(4, 6), 2.0), {"rounding_mode": "floor"}, m=2
    )
    assert "P, P -> P" not in check(aten.add.Tensor, (t(4, 6), ids(3, 4, 6)), m=2)
    check(aten.clamp.default, (t(4, 6), -0.5, 0.5), m=2)
    check(aten.addcmul.default, (t(4, 6), t(4, 6), t(4, 6)), m=2)
    check(aten.dropout.default, (t(4, 6), 0.0, True), m=2)


def test_where_and_masks() -> None:
    mask = torch.rand(4, 1, 8) > 0.5
    assert "S(0), S(1), r -> S(0)" not in check(aten.where.self, (mask, t(6, 8), t(4, 6, 8)), m=2)
    assert "S(2), S(1), S(2) -> S(2)" in check(aten.where.self, (mask, t(6, 8), t(4, 6, 8)), m=2)
    assert "S(1), R -> S(1)" in check(aten.masked_fill.Scalar, (t(4, 6, 8), mask, -1.0), m=2)
    check(aten.where.ScalarOther, (mask, t(4, 6, 8), 0.0), m=2)
    check(aten.gt.Scalar, (t(4, 6), 0.0), m=2)


@pytest.mark.parametrize("m", [2, 4])
def test_norms(m: int) -> None:
    assert "S(0), r, r -> S(0)" in check(
        aten.layer_norm.default, (t(4, 8, 6), [6], t(6), t(6)), m=m
    )
    assert "S(2), r, r -> S(2)" not in check(
        aten.layer_norm.default, (t(4, 8, 6), [6], t(6), t(6)), m=m
    )
    assert "S(1), r -> S(1)" in check(aten.rms_norm.default, (t(4, 8, 6), [6], t(6)), m=m)
    found = check(aten.group_norm.default, (t(3, 16, 4), 4, t(16), t(16)), m=m)
    assert "S(1), S(0), S(0) -> S(1)" in found
    assert not any(
        "S(1)" in x for x in check(aten.group_norm.default, (t(3, 12, 5), 3, t(12), t(12)), m=m)
    )
    mean, var = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    args = (t(3, 8, 5), t(8), t(8), mean, var, False, 0.1, 1e-5, False)
    assert "S(1), S(0), S(0), S(0), S(0) -> S(1)" in check(aten.batch_norm.default, args, m=m)


@pytest.mark.parametrize("m", [2, 3])
def test_convolutions(m: int) -> None:
    found = check(aten.conv2d.default, (t(2, 6, 5, 5), t(12, 6, 3, 3), t(12), [1, 1], [1, 1]), m=m)
    assert {"r, S(0), S(0) -> S(1)", "S(1), S(1), P -> P"} <= found
    depthwise = (t(2, 6, 5, 5), t(12, 1, 3, 3), t(12), [1, 1], [1, 1], [1, 1], 6)
    assert "S(1), S(0), S(0) -> S(1)" in check(aten.conv2d.default, depthwise, m=m)
    check(aten.conv1d.default, (t(2, 6, 9), t(12, 6, 3), t(12), [2]), m=m)
    found = check(aten.conv_transpose2d.input, (t(2, 6, 3, 3), t(6, 12, 2, 2), t(12), [2, 2]), m=m)
    assert {"r, S(1), S(0) -> S(1)", "S(1), S(0), P -> P"} <= found
    grouped = (t(2, 12, 3), t(12, 2, 2), t(12), [2], [0], [0], 6)
    assert "S(1), S(0), S(0) -> S(1)" in check(aten.conv_transpose1d.default, grouped, m=m)


@pytest.mark.parametrize("m", [2, 4])
def test_channels_that_do_not_divide(m: int) -> None:
    found = check(aten.conv2d.default, (t(2, 5, 4, 4), t(7, 5, 3, 3), t(7)), m=m)
    assert {"r, S(0), S(0) -> S(1)", "S(1), S(1), P -> P"} <= found
    depthwise = (t(2, 5, 9), t(10, 1, 3), t(10), [1], [1], [1], 5)
    assert "S(1), S(0, 1, 2), S(0, 1, 2) -> S(1, 1, 2)" in check(
        aten.conv1d.default, depthwise, m=m
    )
    grouped = (t(2, 15, 3), t(15, 2, 2), t(10), [2], [0], [0], 5)
    assert "S(1, 1, 3), S(0, 1, 3), S(0, 1, 2) -> S(1, 1, 2)" in check(
        aten.conv_transpose1d.default, grouped, m=m
    )
    norm = check(aten.group_norm.default, (t(3, 10, 4), 5, t(10), t(10)), m=m)
    assert "S(1, 1, 2), S(0, 1, 2), S(0, 1, 2) -> S(1, 1, 2)" in norm
    few = check(aten.conv2d.default, (t(2, 3, 4, 4), t(3, 3, 3, 3), t(3)), m=5)
    assert not any("S(1)" in x for x in few), "torch has no convolution without channels"


@pytest.mark.parametrize("m", [2, 3, 5])
def test_words_and_classes_that_do_not_divide(m: int) -> None:
    indices = torch.cat([ids(13, 3, 6), torch.full((1, 6), 5)])
    assert "S(0), R -> P" in check(aten.embedding.default, (t(13, 7), indices, 5), m=m)
    target = ids(13, 6)
    target[2] = -100
    for reduction in (0, 1, 2):
        args = (t(6, 13), target, None, reduction, -100, 0.1)
        assert "S(1), R -> R" in check(aten.cross_entropy_loss.default, args, m=m)
    assert "S(1) -> P" in check(aten.mean.dim, (t(4, 7), [1]), m=m)
    assert "S(0), S(0) -> P" in check(aten.mse_loss.default, (t(7, 2), t(7, 2)), m=m)


def test_weight_norm() -> None:
    found = check(aten._weight_norm.default, (t(8, 6, 3), t(8, 1, 1)), m=2)
    assert "S(0), S(0) -> S(0)" in found and not any("S(1)" in spec for spec in found)
    assert "S(1), S(1) -> S(1)" in check(aten._weight_norm.default, (t(3, 8), t(1, 8), 1), m=4)
    assert not any("S" in x for x in check(aten._weight_norm.default, (t(4, 8), t(), -1), m=2))


def test_pooling_and_upsampling() -> None:
    x = t(2, 4, 6, 6)
    for op, args in (
        (aten.max_pool2d.default, ([2, 2],)), (aten.avg_pool2d.default, ([2, 2],)),
        (aten.adaptive_avg_pool2d.default, ([1, 1],)),
        (aten.upsample_nearest2d.vec, (None, [2.0, 2.0])),
        (aten.upsample_bilinear2d.vec, (None, False, [2.0, 2.0])),
    ):  # fmt: skip
        found = check(op, (x, *args), m=2)
        assert "S(1) -> S(1)" in found
        assert ("P -> P" in found) == (op is not aten.max_pool2d.default)
    check(aten.adaptive_avg_pool1d.default, (t(2, 4, 6), [2]), m=2)


@pytest.mark.parametrize("channels, m", [(4, 2), (5, 3)])
def test_unpooling_takes_values_and_their_places_alike(channels: int, m: int) -> None:
    values, places = aten.max_pool2d_with_indices.default(t(2, channels, 6, 6), [2, 2])
    found = check(
        aten.max_unpool2d.default, (values.detach().requires_grad_(), places, [6, 6]), m=m
    )
    assert "S(1), S(1) -> S(1)" in found and not any("S(2)" in spec for spec in found)
    values, places = aten.max_pool3d_with_indices.default(t(channels, 4, 4, 4), [2, 2, 2])
    args = (values.detach().requires_grad_(), places, [4, 4, 4], [2, 2, 2], [0, 0, 0])
    assert "S(0), S(0) -> S(0)" in check(aten.max_unpool3d.default, args, m=m)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("padding", [-1, 5])
def test_embedding(m: int, padding: int) -> None:
    indices = torch.cat([ids(12, 3, 6), torch.full((1, 6), 5)])
    found = check(aten.embedding.default, (t(12, 8), indices, padding), m=m)
    assert {"S(1), R -> S(2)", "S(0), R -> P"} <= found


def bag(mode: str, m: int, weighted: bool = False, last: bool = False) -> set[str]:
    """embedding_bag with an empty bag, a padded index, and bags that have an entry twice."""
    table = t(12, 8)
    with torch.no_grad():
        table[8] = table[2]  # of equal entries the first one in the bag is the largest
    indices = torch.tensor([3, 8, 2, 5, 11, 0, 2, 2, 7, 5])
    offsets = torch.tensor([0, 3, 3, 4, 8, *([10] if last else [])])
    weights = t(10) if weighted else None
    number = ("sum", "mean", "max").index(mode)
    args = (table, indices, offsets, False, number, False, weights, last, 5)
    return check(aten.embedding_bag.padding_idx, args, m=m, compared=1)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, last: bool, m: int) -> None:
    column = "S(1), R, R -> S(1), R, R, " + ("S(1)" if mode == "max" else "R")
    assert {column, "S(0), R, R -> P, R, R, R"} <= bag(mode, m, last=last)


def test_bags_of_weighted_embeddings() -> None:
    assert {"S(1), R, R, r -> S(1), R, R, R", "S(0), R, R, r -> P, R, R, R"} <= bag("sum", 2, True)
    by_frequency = (t(12, 8), ids(12, 6), torch.tensor([0, 2]), True)
    assert not any(
        "S(0)" in s for s in check(aten.embedding_bag.default, by_frequency, compared=1)
    )


def test_reading_by_index() -> None:
    assert "S(1), R -> S(2)" in check(aten.index.Tensor, (t(9, 4), [ids(9, 3, 5)]), m=2)
    assert "S(0), R -> S(0)" in check(aten.index.Tensor, (t(4, 9), [None, ids(9, 5)]), m=2)
    assert "S(2), R, R -> S(1)" in check(
        aten.index.Tensor, (t(5, 6, 4), [ids(5, 3), ids(6, 3)]), m=2
    )
    check(aten.index.Tensor, (t(5, 4, 6), [ids(5, 3), None, ids(6, 3)]), m=2)
    assert "S(0), R -> S(0)" in check(aten.index_select.default, (t(4, 6), 1, ids(6, 3)), m=2)
    check(aten.gather.default, (t(4, 6), 1, ids(6, 4, 3)), m=2)
    found = check(aten.take_along_dim.default, (t(4, 6), ids(6, 4, 3), 1), m=2)
    assert "S(0), S(0) -> S(0)" in found
    check(aten.take_along_dim.default, (t(4, 6), ids(6, 1, 3), 1), m=2)
    check(aten.take_along_dim.default, (t(4, 6), ids(24, 3)), m=2)


def z(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex128).requires_grad_()


def test_complex_values() -> None:
    """Parts and conjugates are linear, sizes and angles are not; the two parts are never cut."""
    for op in (aten.real, aten.imag, aten._conj, aten._conj_physical, aten.resolve_conj):
        assert {"S(0) -> S(0)", "S(1) -> S(1)", "P -> P"} <= check(op.default, (z(4, 6),), m=2)
    for op in (aten.abs, aten.angle, aten.sgn):
        found = check(op.default, (z(4, 6),), m=2)
        assert "S(1) -> S(1)" in found and "P -> P" not in found
    assert {"P, P -> P", "S(1), S(0) -> S(1)"} <= check(aten.complex.default, (t(4, 6), t(6)), m=2)
    assert "P, P -> P" not in check(aten.polar.default, (t(4, 6), t(6)), m=2)
    found = check(aten.view_as_real.default, (z(4, 6),), m=2)
    assert {"S(1) -> S(1)", "P -> P"} <= found
    assert "S(1) -> S(1)" not in check(aten.view_as_real.default, (z(4, 3),), m=4)  # its backward
    found = check(aten.view_as_complex.default, (t(4, 6, 2),), m=2)
    assert {"S(1) -> S(1)", "P -> P"} <= found and not any("S(2)" in x for x in found)
    for a, b in ((z(4, 6), t(4, 6)), (t(4, 6), z(6)), (z(4, 6), z(4, 1))):
        assert "P, r -> P" in check(aten.mul.Tensor, (a, b), m=2)
        assert "P, P -> P" in check(aten.add.Tensor, (a, b), m=2)
        check(aten.div.Tensor, (a, b), m=2)
    assert "S(1), S(0) -> P" in check(aten.matmul.default, (z(4, 6), z(6, 2)), m=2)
    assert "S(1) -> P" in check(aten.sum.dim_IntList, (z(4, 6), [1]), m=3)
    assert "S(0) -> S(1)" in check(aten.mH.default, (z(4, 6),), m=2)


def test_fourier_transforms() -> None:
    found = check(aten.fft_fft.default, (z(4, 6), 8, -1), m=2)
    assert {"S(0) -> S(0)", "P -> P"} <= found and "S(1) -> S(1)" not in found
    assert "S(1) -> S(1)" in check(aten.fft_rfft.default, (t(4, 6), None, 0), m=2)
    assert "S(0) -> S(0)" in check(aten.fft_irfft.default, (z(4, 6), 5), m=2)
    assert "S(0) -> S(0)" in check(aten.fft_fft2.default, (z(4, 6, 8),), m=2)
    assert "S(0) -> S(0)" in check(aten.fft_rfftn.default, (t(4, 6), [8]), m=2)
    assert not any("S(" in x for x in check(aten.fft_fftn.default, (z(4, 6),), m=2))
    assert "S(0) -> S(0)" in check(aten.fft_fftshift.default, (z(4, 6), [1]), m=2)
    assert not any("S(" in x for x in check(aten.fft_fftshift.default, (z(4, 6),), m=2))


def test_reductions() -> None:
    x = t(4, 6, 8)
    found = check(aten.sum.dim_IntList, (x, [1]), m=2)
    assert {"S(0) -> S(0)", "S(2) -> S(1)", "S(1) -> P", "P -> P"} <= found
    found = check(aten.mean.dim, (x, [-1], True), m=4)
    assert {"S(0) -> S(0)", "S(2) -> P", "P -> P"} <= found
    assert {"S(0) -> P", "S(2) -> P"} <= check(aten.mean.default, (x,), m=2)
    assert "S(0) -> P" in check(aten.sum.default, (x,), m=4)
    assert "S(1) -> S(0)" in check(aten.amax.default, (x, [0]), m=2)
    check(aten.var.correction, (x, [1]), {"correction": 0}, m=2)
    check(aten.max.dim, (x, 1), m=2)
    check(aten.cumsum.default, (x, 1), m=2)
    check(aten.topk.default, (x, 2), m=2)
    check(aten.argmax.default, (x, -1), m=2)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_by_classes(m: int, reduction: int, smoothing: float) -> None:
    target = ids(8, 6)
    target[2] = -100
    found = check(
        aten.cross_entropy_loss.default, (t(6, 8), target, None, reduction, -100, smoothing), m=m
    )
    assert "S(1), R -> R" in found
    target = ids(8, 3, 4)
    target[1, 2] = 5
    found = check(
        aten.cross_entropy_loss.default, (t(3, 8, 4), target, None, reduction, 5, smoothing), m=m
    )
    assert "S(1), R -> R" in found
    assert any("S(2), S(1)" in x for x in found) == (reduction != 1)


def test_cross_entropy_of_large_logits() -> None:
    large = (t(6, 8).detach() * 1e4).requires_grad_()
    assert "S(1), R -> R" in check(aten.cross_entropy_loss.default, (large, ids(8, 6)), m=2)


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_distances(reduction: int) -> None:
    out = "P" if reduction else "S(1)"
    assert f"S(1), S(1) -> {out}" in check(
        aten.mse_loss.default, (t(4, 6), t(4, 6, grad=False), reduction), m=2
    )
    args = (t(4, 6), torch.rand(4, 6, dtype=torch.float64), None, None, reduction)
    assert f"S(1), S(1) -> {out}" in check(
        aten.binary_cross_entropy_with_logits.default, args, m=2
    )


def test_torch_computes_nothing_of_nothing() -> None:
    """With fewer channels than ranks a rank would have none, which these operators refuse."""
    x = t(2, 3, 6, 6)
    for op, args in (
        (aten.max_pool2d.default, ([2, 2],)),
        (aten.adaptive_avg_pool2d.default, ([1, 1],)),
        (aten.upsample_nearest2d.vec, (None, [2.0, 2.0])),
        (aten.reflection_pad2d.default, ([1, 1, 1, 1],)),
        (aten.fft_fft.default, ()),
    ):
        assert "S(1) -> S(1)" in check(op, (x, *args), m=2)
        assert "S(1) -> S(1)" not in check(op, (x, *args), m=5)
    assert "S(1) -> S(1)" in check(aten.cumsum.default, (x, 3), m=5)


def test_an_operator_without_rule_stays_whole() -> None:
    assert check(aten.linalg_inv.default, (t(4, 4),), m=2) == {"R -> R", "r -> r"}
    state = torch.zeros(1, 3, 8, dtype=torch.float64)
    weights = [t(32, 4), t(32, 8), t(32), t(32)]
    found = check(
        aten.lstm.input,
        (t(3, 5, 4), [state, state], weights, True, 1, 0.0, True, False, True),
        m=2,
    )
    assert len(found) == 2 and all("S(" not in x for x in found)


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_index_that_is_nobodys_is_refused_by_every_rank(wrong: int) -> None:
    """As by the whole operator; no rank takes it for one of another's."""
    table, where = t(5, 3), torch.tensor([2, wrong])
    within = "outside of 0 to 9"

    def told(group: ThreadGroup) -> list[str]:
        axis, offsets = ThreadAxis(group), torch.tensor([0])
        calls: list[Callable[[], torch.Tensor]] = [
            lambda: embedding_of_part(axis, table, where, -1, 10),
            lambda: embedding_bag_of_part(axis, table, 10, indices=where, offsets=offsets),
            lambda: cross_entropy_of_part(axis, t(2, 5), where, 1, -100, 0.0, 10),
        ]
        sentences = []
        for call in calls:
            with pytest.raises(RuntimeError) as error:
                call()
            sentences.append(str(error.value))
        return sentences

    for sentences in spin(2, told):
        assert all(within in sentence for sentence in sentences), sentences
