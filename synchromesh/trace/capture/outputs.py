"""Outputs: what a loss or metric returned, as names and 0-d tensors, and the carry beside them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class BadOutput(ValueError):
    """The loss is none that can be trained (no 0-d tensors, learnable parameters of its own); the
    message is for the user."""


@dataclass(frozen=True)
class WithCarry:
    """What a loss or metric with a carry returned: its result without the carry, and the carry's
    leaves by name, detached."""

    result: Any
    leaves: dict[str, Tensor]


def flat_outputs(result: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and 0-d tensors of what the loss returned: a loss, (sum, weight), or metrics; without
    the carry, where there is one."""
    result = result.result if isinstance(result, WithCarry) else result
    names: tuple[str, ...]
    if isinstance(result, Tensor):
        names, values = ("loss",), [result]
    elif isinstance(result, (tuple, list)) and len(result) == 2:
        names, values = ("sum", "weight"), list(result)
    elif isinstance(result, dict) and result:
        names, values = tuple(str(k) for k in result), list(result.values())
    else:
        raise BadOutput(
            f"the loss returned {type(result).__name__}: it should return a scalar tensor, a pair "
            "(sum, weight), or for metrics a dict of scalar tensors"
        )
    like = next((v for v in values if isinstance(v, Tensor)), None)
    if like is None:
        raise BadOutput(
            f"the loss or metric returned no tensor but {result!r}: return the tensor itself, "
            "without .item()"
        )
    tensors = [
        v if isinstance(v, Tensor) else torch.full((), v, dtype=like.dtype, device=like.device)
        for v in values
    ]
    for name, value in zip(names, tensors, strict=True):
        if value.dim() > 0:
            raise BadOutput(
                f"{name} has {value.dim()} dimensions: return a scalar (0-d tensor), for example "
                "a mean over rows"
            )
    return names, tuple(tensors)


def carried(result: Any) -> dict[str, Tensor]:
    """The carry's leaves of what a loss or metric returned; none where it has no carry."""
    return result.leaves if isinstance(result, WithCarry) else {}


def refuse_metrics(names: tuple[str, ...]) -> None:
    """BadOutput where a loss gave several values by name: which of them trains is not known."""
    if names not in (("loss",), ("sum", "weight")):
        raise BadOutput(
            f"the loss returned a dict ({', '.join(names)}), as metrics do: return the scalar "
            "tensor that is to be trained, or a pair (sum, weight)"
        )
