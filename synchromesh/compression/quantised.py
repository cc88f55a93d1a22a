"""Quantised sums: numbers of fewer bits, by all-to-all, local sum and all-gather, as a ring would
send them, so that a rank sends as much whatever their number.

    rank i    C(part j of g_i + e_i) -> rank j           e_i  keeps what that loses
    rank j    s_j = sum over i of what came + f_j
              C(s_j) -> all ranks                        f_j  keeps what that loses

    fp16      half precision; what is larger is cut off there, and owed
    int8      q = round(127 x / m), m the largest magnitude of a block of 256 numbers: m q / 127
    onebit    m sign(x), m the mean magnitude of a block (Seide et al. 2014, "1-Bit Stochastic
              Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
              DNNs", Interspeech; the scale of Karimireddy et al. 2019)"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from synchromesh.compression.compressor import CollectiveCall, Compressor, Rounds
from synchromesh.values.compression import CompressedSizes

BLOCK = CompressedSizes.BLOCK


class Quantised(Compressor):
    """`second`: the residual of the sums that this rank makes; f above."""

    def __init__(self, sizes: CompressedSizes, index: int, like: Tensor) -> None:
        super().__init__(sizes, index, like)
        self.residual = self.zeros(sizes.ranks * sizes.part)  # parts are equally long
        self.second = self.zeros(sizes.part)
        start = index * sizes.part
        self._own = slice(min(start, sizes.numbers), min(start + sizes.part, sizes.numbers))
        self._encode, self._decode = CODES[sizes.name]

    @property
    def kept(self) -> list[Tensor]:
        return [self.residual, self.second]

    def rounds(self, flags: Tensor) -> Rounds:
        ranks, numbers, count = self.sizes.ranks, self.sizes.numbers, len(flags)
        parts = self.residual.view(ranks, -1)
        sent = self._encode(parts)
        parts.sub_(self._decode(sent, self.dtype))
        self.residual[numbers:] = 0.0
        sent, size = torch.cat([sent, flags.expand(ranks, count)], 1), sent.nbytes
        got = yield CollectiveCall("all_to_all", sent, size)
        total, counts = self.second, got[:, -count:].sum(0)
        for row in got[:, :-count]:
            total += self._decode(row.clone()[None], self.dtype)[0]
        total[self._own.stop - self._own.start :] = 0.0
        sent = self._encode(total[None])
        total.sub_(self._decode(sent, self.dtype)[0]).nan_to_num_(0.0, 0.0, 0.0)
        del got, row
        everyone = yield CollectiveCall("all_gather", sent[0], ranks * sent.nbytes)
        return self._decode(everyone, self.dtype).view(-1)[:numbers], counts

    def owed(self) -> Tensor:
        owed = super().owed()
        owed[self._own] += self.second[: self._own.stop - self._own.start]
        return owed

    def owe(self, owed: Tensor) -> None:
        super().owe(owed)
        self.second.zero_()


def to_half(x: Tensor) -> Tensor:
    """(rows, n) -> (rows, 2 n) bytes"""
    most = torch.finfo(torch.float16).max
    total = x.sum(1, keepdim=True)  # where that is not finite, no number of the row is
    return x.half().clamp_(-most, most).add_((total - total).half()).view(torch.uint8)


def from_half(code: Tensor, dtype: torch.dtype) -> Tensor:
    return code.view(torch.float16).to(dtype)


def to_int8(x: Tensor) -> Tensor:
    """(rows, n) -> (rows, n + n / 64) bytes: q, then scales m / 127 in float32."""
    blocks = x.view(len(x), -1, BLOCK)
    largest = torch.maximum(blocks.amax(2), -blocks.amin(2))
    scales = (largest / 127).float()
    safe = torch.where(scales == 0, 1.0, scales).unsqueeze(2).to(x.dtype)
    numbers = (blocks / safe).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([numbers.view(len(x), -1).view(torch.uint8), scales.view(torch.uint8)], 1)


def from_int8(code: Tensor, dtype: torch.dtype) -> Tensor:
    numbers, scales = _split(code, BLOCK)
    blocks = numbers.view(torch.int8).view(len(code), -1, BLOCK).to(dtype)
    return blocks.mul_(scales.unsqueeze(2)).view(len(code), -1)


def to_onebit(x: Tensor) -> Tensor:
    """(rows, n) -> (rows, n / 8 + n / 64) bytes: signs (1: not negative), then scales."""
    scales = x.view(len(x), -1, BLOCK).abs().mean(2).float()
    signs = (x >= 0).view(len(x), 8, -1).to(torch.uint8)  # bit k: of the k-th eighth of the row
    packed = signs[:, 0].clone()
    for bit in range(1, 8):
        packed |= signs[:, bit] << bit
    return torch.cat([packed, scales.view(torch.uint8)], 1)


def from_onebit(code: Tensor, dtype: torch.dtype) -> Tensor:
    packed, scales = _split(code, BLOCK // 8)
    signs = torch.stack([(packed >> bit) & 1 for bit in range(8)], 1)
    blocks = signs.view(len(code), -1, BLOCK).to(dtype).mul_(2).sub_(1)
    return blocks.mul_(scales.unsqueeze(2)).view(len(code), -1)


def _split(code: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
    """The codes of all blocks, and their scales. block_bytes: of a block's code."""
    blocks = code.shape[1] // (block_bytes + CompressedSizes.SCALE_BYTES)
    codes, scales = code.split([blocks * block_bytes, blocks * CompressedSizes.SCALE_BYTES], 1)
    return codes.contiguous(), scales.contiguous().view(torch.float32)


Code = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, torch.dtype], Tensor]]
CODES: Mapping[str, Code] = {
    "fp16": (to_half, from_half),
    "int8": (to_int8, from_int8),
    "onebit": (to_onebit, from_onebit),
}
