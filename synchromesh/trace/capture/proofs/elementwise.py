"""Proofs of operators that compute each entry of a row from entries of that row alone.

Elementwise ones take entries at the same place; the others leave all dimensions but some apart,
and the rows must be along one that they leave apart."""

from collections.abc import Callable

import torch

from synchromesh.trace.nodes import RECURRENT, by_operator, dims_of, has_tag
from synchromesh.trace.rules.elementwise import FILLING, NAMES
from synchromesh.trace.rules.loss import DISTANCES

from ..row_layout import Case, RowLayout, RowOperand

LIKE_FIRST = {"type_as", "copy", "expand_as"}  # of whose second tensor only type or shape matter
ELEMENTWISE = NAMES | {
    "rsub", "isin", "bernoulli", "normal_functional", "native_dropout", "feature_alpha_dropout",
    "alpha_dropout", "copy", "exponential", "uniform", "cauchy", "log_normal", "geometric", "fill",
    "rrelu_with_noise_functional",
    # losses without a reduction; with one they have no rows
    *DISTANCES, "kl_div", "soft_margin_loss", "poisson_nll_loss", "margin_ranking_loss",
    "hinge_embedding_loss",
}  # fmt: skip
RANDOM_LIKE = {"rand_like", "randn_like", "randint_like"}


def is_elementwise(case: Case) -> bool:
    return has_tag(case.node, torch.Tag.pointwise) or case.name in ELEMENTWISE | RANDOM_LIKE


def elementwise(case: Case) -> RowLayout:
    """Broadcast from the right; entries filled in are the same, or drawn from the same
    distribution, for all rows."""
    if case.name in FILLING | RANDOM_LIKE | MADE:
        return case.result.in_any_order
    return right_aligned(case, case.operands[:1] if case.name in LIKE_FIRST else case.with_rows)


def right_aligned(case: Case, operands: list[RowOperand], last: int = 0) -> RowLayout:
    """All rows at the result's dimension, counted from the right, and none in the last ones."""
    for operand in operands:
        if operand.rows is None:
            continue
        layout = operand.layout
        if layout.dim >= operand.rank - last:
            raise case.coupled(layout.dim)
        if layout.dim + case.rank - operand.rank != case.result.dim:
            raise case.unproved()
    return case.shared_layout(operands)


def last_dims(case: Case) -> int | None:
    """How many last dimensions of its tensor the operator works on, None for other operators."""
    name = case.name
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return len(case.constant("normalized_shape"))
    if name in ("pad", "constant_pad_nd"):
        return max((i // 2 + 1 for i, p in enumerate(case.constant("pad")) if p), default=0)
    if name.startswith(SPATIAL):
        return next((int(c) for c in name if c.isdigit()), 0)
    return EXACTLY.get(name)


# by the beginning of the name, which says of how many dimensions: max_pool2d
SPATIAL = (
    "max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "upsample_", "_upsample_",
    "mkldnn_max_pool", "reflection_pad", "replication_pad", "fractional_max_pool",
)  # fmt: skip
EXACTLY = {
    "tril": 2, "triu": 2, "linalg_inv": 2, "linalg_inv_ex": 2, "inverse": 2, "linalg_det": 2,
    "linalg_slogdet": 2, "linalg_cholesky": 2, "linalg_cholesky_ex": 2, "cholesky": 2,
    "linalg_qr": 2, "linalg_svd": 2, "linalg_svdvals": 2, "linalg_eigh": 2, "linalg_eigvalsh": 2,
    "matrix_exp": 2, "linalg_matrix_exp": 2, "linalg_matrix_power": 2, "linalg_pinv": 2,
    "one_hot": 0, "view_as_real": 0, "view_as_complex": 1, "multinomial": 1, "pixel_shuffle": 3,
    "pixel_unshuffle": 3,
}  # fmt: skip


def trailing(case: Case) -> RowLayout:
    """Pooling, norms of the last dimensions, matrices of a batch: those ahead are apart."""
    last = last_dims(case)
    assert last is not None
    source = case.first
    if any(e is not source for e in case.with_rows) or source.rows is None:
        raise case.unproved()
    dim = source.layout.dim
    if dim >= source.rank - last:
        raise case.positional() if case.name in ("tril", "triu") else case.coupled(dim)
    if dim != case.result.dim:
        raise case.unproved()
    return case.shared_layout()


def batched(case: Case) -> RowLayout:
    """Convolutions, unpooling, losses per row and the like: dimension 0 of all is apart."""
    unbatched = case.name.startswith("conv") and case.first.rank != case.operands[1].rank
    if case.result.dim or unbatched:
        raise case.coupled(case.with_rows[0].layout.dim)
    for operand in case.with_rows:
        if operand.argument in ("weight", "bias", "running_mean", "running_var"):
            raise case.unproved()
        if operand.layout.dim:
            raise case.coupled(operand.layout.dim)
    return case.shared_layout()


def normalised(case: Case) -> RowLayout:
    """batch_norm: statistics over the rows are the engine's matter, in which order is not."""
    if case.with_rows != [case.first]:
        raise case.unproved()
    return case.shared_layout()


def contracted(case: Case) -> RowLayout:
    """Products: dimensions that are not summed over keep their entries, those of a batch meet."""
    if case.name == "einsum":
        return summed_by_letters(case)
    if any(e.grid for e in case.with_rows):
        if case.result.count > 1 or not all(e.grid or e.one_per_row for e in case.with_rows):
            raise case.unproved()
        return case.result.in_any_order
    for operand in case.with_rows:
        if operand.argument == "bias" and operand.layout.dim != operand.rank - 1:
            raise case.unproved()
    return case.shared_layout()


def is_grid(case: Case) -> bool:
    """Whether a result with rows along two dimensions has every row with every row in order."""
    keeps = case.name in PRODUCTS | {"softmax", "log_softmax"} or is_elementwise(case)
    return keeps and not case.numbers and all(e.grid or e.one_per_row for e in case.with_rows)


def summed_by_letters(case: Case) -> RowLayout:
    """einsum: a letter for the rows that the result does not have is summed over."""
    equation = case.constant("equation")
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return case.shared_layout()
    given, made = equation.replace(" ", "").split("->")
    for letters, operand in zip(given.split(","), case.operands, strict=True):
        if operand.rows is not None and letters[operand.layout.dim] != made[case.result.dim]:
            raise case.coupled(operand.layout.dim)
    return case.shared_layout()


def attended(case: Case) -> RowLayout:
    """Attention: queries, keys, values and mask have rows ahead of their last two dimensions."""
    return right_aligned(case, case.with_rows, last=2)


def recurrent(case: Case) -> RowLayout:
    """LSTM, GRU: rows beside the time, states as (layers, rows, width)."""
    if case.overload != "input" or case.first.rank != 3:
        raise case.unproved()
    beside = 0 if case.constant("batch_first") else 1
    for operand in case.with_rows:
        if operand.argument == "params":
            raise case.unproved()
        if operand.layout.dim != (beside if operand is case.first else 1):
            raise case.coupled(operand.layout.dim)
    return case.shared_layout()


def of_pairs(case: Case) -> RowLayout:
    """bilinear, pairwise_distance: the last dimension is taken together."""
    for operand in case.with_rows:
        if operand.argument in ("weight", "bias"):
            raise case.unproved()
    return right_aligned(case, case.with_rows, last=1)


DIMS = ("dim", "dims", "dimension")  # as an argument is called that names dimensions


def along_dims(case: Case) -> RowLayout:
    """Sums, softmax, sort, fft ...: they work along the dimensions named, and no others."""
    given = case.constant(next(n for n in DIMS if case.takes(n)))
    source = case.with_rows[0]
    layout = source.layout
    if given is None or (isinstance(given, list | tuple) and not given):
        raise case.coupled(layout.dim)  # along all
    if layout.dim in dims_of(given, source.rank):
        raise case.coupled(layout.dim)
    if any(e.rank != source.rank or e.layout.dim != layout.dim for e in case.with_rows):
        raise case.unproved()
    return case.shared_layout()


PRODUCTS = {
    "linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "addbmm", "outer",
    "einsum", "tensordot", "inner", "chain_matmul", "linalg_multi_dot", "linalg_matmul",
}  # fmt: skip
MADE = {
    "full", "zeros", "ones", "empty", "rand", "randn", "randint", "new_full", "new_zeros",
    "new_ones", "new_empty", "empty_permuted",
}  # fmt: skip
PROOFS: dict[str, Callable[[Case], RowLayout]] = by_operator({
    batched: (
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d "
        "group_norm native_group_norm instance_norm grid_sampler grid_sampler_2d grid_sampler_3d "
        "affine_grid_generator im2col col2im channel_shuffle feature_dropout lstm_cell gru_cell "
        "rnn_tanh_cell rnn_relu_cell cross_entropy_loss nll_loss nll_loss_nd nll_loss2d "
        "multi_margin_loss multilabel_margin_loss max_unpool2d max_unpool3d"
    ),
    normalised: "batch_norm",
    attended: "scaled_dot_product_attention",
    of_pairs: "bilinear pairwise_distance",
    elementwise: " ".join(MADE),
    contracted: " ".join(PRODUCTS),
    recurrent: " ".join(RECURRENT),
})  # fmt: skip
