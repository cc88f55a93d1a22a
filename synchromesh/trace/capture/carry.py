"""A carry: what a recurrent model hands from batch to batch, as further leaves of the batch.

    loss(model, batch, carry) -> (loss, carry)              the user's
    Carrying(loss)(model, {"batch": ..., "carry": ...})     what is traced, run, divided by rows

No gradient goes from batch to batch: back-propagation is truncated there (Williams and Peng 1990,
doi.org/10.1162/neco.1990.2.4.490, with h = h': the steps of a batch)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .batch import leaves, row_count
from .outputs import BadOutput, WithCarry

Start = Callable[[int], Any]  # rows of a batch -> the carry at the beginning of streams


@dataclass(frozen=True)
class Carrying:
    """A loss or metric with a carry, as a function of a model and a batch joined with the carry.
    BadOutput where it returns no carry like the one that it was given."""

    function: Callable[..., Any]

    def __call__(self, model: Any, joined: Any) -> WithCarry:
        returned = self.function(model, joined["batch"], joined["carry"])
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            kind = "a tensor" if isinstance(returned, Tensor) else type(returned).__name__
            kind = f"{len(returned)} values" if isinstance(returned, tuple | list) else kind
            raise BadOutput(
                f"the loss or metric returned {kind}, but it takes a carry: it should return a "
                "pair, (loss, carry)"
            )
        return WithCarry(returned[0], detached(joined["carry"], returned[1]))


def detached(given: Any, made: Any) -> dict[str, Tensor]:
    """The leaves of a new carry by name, in the types of the old one's: under autocast a layer
    gives its state in another type than it takes. BadOutput where it is not like the old one."""
    old, new = carry_leaves(given), carry_leaves(made)
    if list(old) != list(new):
        raise BadOutput(
            f"the loss or metric was given a carry of {_listed(old)}, and returned one of "
            f"{_listed(new)}: it should return the same tensors in the same tuples and dicts"
        )
    for name, x in old.items():
        same = x.dim() == new[name].dim() and x.shape[1:] == new[name].shape[1:]
        if not same or x.shape[0] != new[name].shape[0]:
            raise BadOutput(
                f"the loss or metric was given {name} of shape {list(x.shape)}, and returned it "
                f"as {list(new[name].shape)}: a carry keeps its shape, and dim 0 of each of its "
                "tensors is the rows of the batch"
            )
    # a copy: tracing takes an LSTM's state for float32, which under autocast it is not
    return {n: x.detach().to(old[n].dtype, copy=True) for n, x in new.items()}


def _listed(tensors: dict[str, Tensor]) -> str:
    return ", ".join(tensors) or "no tensors"


def carry_leaves(carry: Any) -> dict[str, Tensor]:
    """The tensors of a carry by name: `carry`, `carry.0`, `carry.h`."""
    return {leaf.name: leaf.tensor for leaf in leaves({"carry": carry})}


def with_leaves(carry: Any, tensors: Mapping[str, Tensor]) -> Any:
    return pytree.tree_unflatten(list(tensors.values()), pytree.tree_structure(carry))


def join(batch: Any, carry: Any) -> Any:
    return {"batch": batch, "carry": carry}


def joined(function: Any, batch: Any, start: Start | None) -> tuple[Any, Any]:
    """A loss and an example batch as they are traced: with the carry, if any, as streams begin."""
    if start is None:
        return function, batch
    return Carrying(function), join(batch, started(start, row_count(batch)))


def started(start: Start, rows: int) -> Any:
    """The carry at the beginning of streams. ValueError where it has other rows."""
    for count in (rows + 1, rows):  # a dim that has as many by chance is no dim of rows
        carry = start(count)
        tensors = pytree.tree_leaves(carry)
        if odd := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)] or not tensors:
            what = f"holds {odd[0]}" if isinstance(odd, list) else "holds no tensor"
            raise ValueError(
                f"carry({count}) {what}: it should be a tensor, or a tuple or dict of tensors, "
                "whose dim 0 is rows"
            )
        for name, x in carry_leaves(carry).items():
            if not x.dim() or x.shape[0] != count:
                raise ValueError(
                    f"carry({count}) has {name} of shape {list(x.shape)}: dim 0 of each of its "
                    f"tensors should be the {count} rows, which are divided over ranks as those "
                    "of a batch"
                )
    return pytree.tree_map(lambda x: x.detach(), carry)
