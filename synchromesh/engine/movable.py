"""A movable tensor: in a form that a backend can move.

What gloo of torch 2.13 can do (measured): every collective takes float64/32/16, bfloat16,
int64/32/8, uint8, bool and complex64/128, unequal and empty all-to-all parts included. int16,
wider unsigned and 8-bit floating types are refused, so movers send them as bytes and reductions
int16 as int32. It reads memory as it lies, so lazy conjugates and negatives are resolved first."""

import torch
from torch import Tensor

_MOVED_AS_BYTES = frozenset(
    {
        torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    }
)  # fmt: skip


def resolved(x: Tensor) -> Tensor:
    """`x` as its memory has it: `conj` and `imag` may leave a change of sign for the reader."""
    return x.detach().resolve_conj().resolve_neg()


def movable(x: Tensor) -> Tensor:
    """`x`, contiguous, as a dtype that every backend can move."""
    x = resolved(x).contiguous()
    if x.dtype in _MOVED_AS_BYTES:
        return x.reshape(*x.shape, 1).view(torch.uint8)
    return x


def bytes_of(x: Tensor) -> memoryview:
    """The entries of `x` in order, on the host."""
    return resolved(x).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
