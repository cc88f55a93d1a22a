"""Outputs: what a loss or metric returned, as names and 0-d tensors, with what it reports and the
carry beside them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class BadOutput(ValueError):
    """The loss is none that can be trained; the message is for the user."""


@dataclass(frozen=True)
class WithCarry:
    """What a loss with a carry returned: its result without it, the carry's leaves, detached."""

    result: Any
    leaves: dict[str, Tensor]


def flat_outputs(result: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """Names and 0-d tensors of what the loss returned: a loss, (sum, weight), or metrics."""
    return _flat(named(result))


def _flat(by_name: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    like = next((v for v in by_name.values() if isinstance(v, Tensor)), None)
    if like is None:
        raise BadOutput(
            f"the loss or metric returned no tensor but {by_name!r}: return the tensor itself, "
            "without .item()"
        )
    tensors = [
        v if isinstance(v, Tensor) else torch.full((), v, dtype=like.dtype, device=like.device)
        for v in by_name.values()
    ]
    for name, value in zip(by_name, tensors, strict=True):
        if value.dim() > 0:
            raise BadOutput(
                f"{name} has {value.dim()} dimensions: return a scalar (0-d tensor), for example "
                "a mean over rows"
            )
    return tuple(by_name), tuple(tensors)


def named(result: Any) -> dict[str, Any]:
    """The loss, the pair (sum, weight) or the metrics that were returned, by name."""
    result, _ = _parted(result)
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return dict(zip(("sum", "weight"), result, strict=True))
    if isinstance(result, dict) and result:
        return {str(name): value for name, value in result.items()}
    raise BadOutput(
        f"the loss returned {type(result).__name__}: it should return a scalar tensor, a pair "
        "(sum, weight), or for metrics a dict of scalar tensors"
    )


def reported(result: Any) -> dict[str, Tensor]:
    """What is returned beside a loss, `(loss, {name: value})`, detached, by name."""
    _, beside = _parted(result)
    if not beside:
        return {}
    names, values = _flat({str(name): value for name, value in beside.items()})
    return {name: value.detach() for name, value in zip(names, values, strict=True)}


def _parted(result: Any) -> tuple[Any, dict[Any, Any]]:
    """What was returned without the carry, and what is reported beside it."""
    result = result.result if isinstance(result, WithCarry) else result
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[1], dict):
        return result[0], result[1]
    return result, {}


def carried(result: Any) -> dict[str, Tensor]:
    return result.leaves if isinstance(result, WithCarry) else {}


def of_loss(result: Any) -> bool:
    """Whether it is what a loss returns, a scalar or a pair, and not what a metric does."""
    return not isinstance(_parted(result)[0], dict)


def refuse_loss(found: bool) -> None:
    if found:
        raise BadOutput(
            "the metric returned a scalar or a pair, as losses do: return {name: sum over the "
            "batch's rows}, a dict, of which evaluate gives the means over all rows"
        )


def refuse_metrics(names: tuple[str, ...]) -> None:
    """BadOutput where a loss gave several values by name: which of them trains is not known."""
    if names not in (("loss",), ("sum", "weight")):
        raise BadOutput(
            f"the loss returned a dict ({', '.join(names)}), as metrics do: return the scalar "
            "tensor that is to be trained, or a pair (sum, weight)"
        )
