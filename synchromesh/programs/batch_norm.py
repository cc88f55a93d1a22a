"""Batch norm in training mode: statistics of a row block, or of all rows over the data ranks.

    y = xhat * weight + bias, xhat = (x - mean) s, s = 1 / sqrt(var + eps)      per channel

Synchronised, with n values per channel over all ranks:

    dx = weight s (dy - sum(dy) / n - xhat sum(dy xhat) / n)   sums over all: one all-reduce
    dweight = sum(dy xhat), dbias = sum(dy)                    of this rank: summed with the others
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class DataRanks(Protocol):
    """The ranks over which statistics are summed: a `Group`, or `AnnouncedCollectives` of one."""

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Any: ...


class NormArguments(NamedTuple):
    """What batch norm is called with (`trace.rules.axis`); x: (rows, channels, ...)."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float


@dataclass(frozen=True)
class BatchNormPolicy:
    """What the statistics cover: the row block (None) or all rows over `data`, the data ranks."""

    data: DataRanks | None = None

    def apply(self, given: NormArguments, *, real: bool) -> Tensor:
        """Normalises `given.x`. real: stand-ins leave no trace in the running statistics."""
        if given.training and self.data is not None and self.data.size > 1:
            learned = given.weight, given.bias
            y: Tensor = _Synchronised.apply(given.x, *learned, given, real, self.data)
            return y
        if given.training:
            given = _of_a_block(given, real)
        return torch.batch_norm(*given, torch.backends.cudnn.enabled)


def _of_a_block(given: NormArguments, real: bool) -> NormArguments:
    """Without the running statistics, where torch must not update them."""
    x, mean = given.x, given.running_mean
    values = x.numel() // x.shape[1]
    if real and values > 1:
        return given
    if real and mean is not None:  # one value has no unbiased variance: torch would write NaN
        mean.lerp_(x.detach().reshape(-1).to(mean.dtype), given.momentum)
    return given._replace(running_mean=None, running_var=None)


class _Synchronised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, given: NormArguments,
        real: bool, group: DataRanks,
    ) -> Tensor:  # fmt: skip
        exact = torch.promote_types(x.dtype, torch.float32)
        mean, var, count = _statistics(x.to(exact), real, group)
        if count < 2:
            raise ValueError(
                f"batch norm in training mode needs at least 2 values per channel (the global "
                f"batch, or its micro-batch, has {count}); give it more rows"
            )
        if given.running_mean is not None and given.running_var is not None:
            unbiased = var * (count / (count - 1))
            given.running_mean.lerp_(mean.to(given.running_mean.dtype), given.momentum)
            given.running_var.lerp_(unbiased.to(given.running_var.dtype), given.momentum)
        scale = torch.rsqrt(var + given.eps)
        normal = (x.to(exact) - _channels(mean, x)) * _channels(scale, x)
        ctx.save_for_backward(normal, weight, scale)
        dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        ctx.way = group, real, count, x.dtype, dtypes
        y = normal
        if weight is not None:
            y = y * _channels(weight.to(exact), x)
        if bias is not None:
            y = y + _channels(bias.to(exact), x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        normal, weight, scale = ctx.saved_tensors
        group, real, count, dtype, dtypes = ctx.way
        gradient = gradient.to(normal.dtype)
        others = [d for d in range(normal.dim()) if d != 1]
        dbias, dweight = gradient.sum(others), (gradient * normal).sum(others)
        if not real:  # a stand-in has no part in the statistics, nor they in it
            dbias, dweight = torch.zeros_like(dbias), torch.zeros_like(dweight)
        sums = torch.stack([dbias, dweight])
        group.all_reduce(sums)
        dx = None
        if ctx.needs_input_grad[0]:
            if real:
                means = sums / count
                dx = gradient - _channels(means[0], normal) - normal * _channels(means[1], normal)
                factor = scale if weight is None else scale * weight.to(scale.dtype)
                dx = (dx * _channels(factor, normal)).to(dtype)
            else:
                dx = torch.zeros_like(normal, dtype=dtype)
        each = zip((dweight, dbias), dtypes, ctx.needs_input_grad[1:3], strict=True)
        own = [g.to(d) if needed else None for g, d, needed in each]
        return dx, *own, None, None, None


def _statistics(x: Tensor, real: bool, group: DataRanks) -> tuple[Tensor, Tensor, int]:
    """Mean, biased variance and values per channel over the real rows of all ranks. Each rank's
    mean and squared deviations are gathered and combined (Chan et al. 1979), which is as exact as
    two passes and takes one collective of 2 channels + 1 numbers."""
    others = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1] if real else 0
    if real:
        var, mean = torch.var_mean(x, others, correction=0)
        own = torch.cat([mean, var, x.new_tensor([count])])
    else:
        own = x.new_zeros(2 * x.shape[1] + 1)
    each = group.all_gather(own)
    means, variances, counts = each[:, : x.shape[1]], each[:, x.shape[1] : -1], each[:, -1:]
    total = counts.sum()
    share = counts / total.clamp(min=1)
    mean = (share * means).sum(0)
    var = (share * (variances + (means - mean).square())).sum(0)
    return mean, var, int(total)


def _channels(x: Tensor, like: Tensor) -> Tensor:
    return x.view(1, -1, *(1 for _ in range(like.dim() - 2)))
