"""Low-rank sums: a matrix as the product of two thin ones, which sum over ranks.

PowerSGD (Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS, algorithms 1 and 2), of M_i = g_i + e_i, a x b, with Q of the step before:

    P = orthogonal(sum over i of M_i Q)        a x r, all-reduced
    Q_i = M_i^T P,  Q = sum over i of Q_i      b x r, all-reduced
    the sum is P Q^T,  e_i <- M_i - P Q_i^T

A tensor is the matrix of its first dimension by the others. What has no fewer numbers that way is
summed whole with P. All of it is linear in the sum of M_i, so that residuals count by their sum
alone. A direction that M does not have (it has a rank below r) is rounding and nothing else: it is
left out, and its column of Q begins anew, so that equal runs stay equal."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from synchromesh.compression.compressor import CollectiveCall, Compressor, Rounds
from synchromesh.values.compression import CompressedSizes, low_rank, matrix


class LowRank(Compressor):
    def __init__(self, sizes: CompressedSizes, index: int, like: Tensor) -> None:
        super().__init__(sizes, index, like)
        rank, random = int(sizes.amount), torch.Generator().manual_seed(0)
        self._low = [low_rank(shape, rank) for shape in sizes.shapes]
        widths = [matrix(s)[1] for s, low in zip(sizes.shapes, self._low, strict=True) if low]
        self.factors = [
            torch.randn(b, rank, generator=random, dtype=torch.float64).to(like.device, self.dtype)
            for b in widths
        ]
        self._first = [q.clone() for q in self.factors]

    @property
    def kept(self) -> list[Tensor]:
        return [self.residual, *self.factors, *self._first]

    def _matrices(self, x: Tensor, low: bool) -> Iterator[Tensor]:
        """Views of those in `x` that are sent as factors, or whole."""
        parts = x.split([prod(shape) for shape in self.sizes.shapes])
        for part, shape, is_low in zip(parts, self.sizes.shapes, self._low, strict=True):
            if is_low == low:
                yield part.view(matrix(shape))

    def rounds(self, flags: Tensor) -> Rounds:
        low, whole = ([*self._matrices(self.residual, is_low)] for is_low in (True, False))
        begun = map(_begun, self.factors, self._first)
        # thin on the left: MKL took 2 and 10 times as long for M Q and M^T P (rank 4, 1024 x 4096)
        left = [(q.T @ m.T).T for m, q in zip(low, begun, strict=True)]
        sent = _joined([*left, *whole, flags.to(self.dtype)])
        flag_bytes = len(flags) * sent.element_size()
        got = yield CollectiveCall("all_reduce", sent, sent.nbytes - flag_bytes)
        left, own, counts = _parts(got, left, whole, [flags])
        if low:
            left = [*map(orthogonal, left)]
            sent = _joined([(p.T @ m).T for m, p in zip(low, left, strict=True)])
            (right,) = _parts(sent, self.factors)
            for m, p, q in zip(low, left, right, strict=True):
                m.addmm_(p, q.T, alpha=-1)
            got = yield CollectiveCall("all_reduce", sent, sent.nbytes)
            for q, x in zip(self.factors, _parts(got, self.factors)[0], strict=True):
                q.copy_(x)
        return self._total(left, own), counts[0]

    def _total(self, left: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        """P Q^T of all matrices, and the sums of what is sent whole, of which nothing is owed."""
        total = torch.empty_like(self.residual)
        for m, p, q in zip(self._matrices(total, True), left, self.factors, strict=True):
            torch.mm(p, q.T, out=m)
        for m, summed in zip(self._matrices(total, False), own, strict=True):
            m.copy_(summed)
        for m in self._matrices(self.residual, False):
            m.zero_()
        return total


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in parts])


def _parts(x: Tensor, *like: Sequence[Tensor]) -> list[list[Tensor]]:
    """What `_joined` has joined of all of `like`, in their shapes."""
    parts = iter(x.split([y.numel() for its in like for y in its]))
    return [[next(parts).view(y.shape) for y in its] for its in like]


def _least(x: Tensor) -> float:
    """The part of the largest direction below which one is rounding."""
    return float(torch.finfo(x.dtype).eps ** 0.5)


def _begun(q: Tensor, first: Tensor) -> Tensor:
    """The columns of q, each of length 1; those that have come to nothing begin anew."""
    lengths = q.norm(dim=0)
    return torch.where(lengths > _least(q) * lengths.max(), q / lengths, first)


def orthogonal(p: Tensor) -> Tensor:
    """(a, r) orthonormal columns that span those of `p`; zeros where one depends on others."""
    q, r = torch.linalg.qr(p)
    lengths = r.diagonal().abs()
    kept = lengths > _least(p) * p.norm(dim=0).max()
    return torch.where(kept, q, 0.0)
