"""State changes: what a step of a model, as it is, changes of the state that the model keeps."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batch import autocast_for, copy_of, example, take
from .export import Function, quiet
from .gradients import without_dropout
from .known_values import digest
from .model_snapshot import CONTAINER_LIMITS, CONTAINERS, attributes_of, items_of, preserved
from .outputs import flat_outputs


@dataclass(frozen=True)
class Changes:
    """What a step changes of the model's parameters, buffers and attributes, by name: `fed` by the
    values of its rows, `free` whatever they are. outputs: the names of what its loss gives."""

    free: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@quiet()
def changes(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None = None
) -> Changes:
    """What a step of the model changes.

    From steps on several blocks of rows that all begin in the same state: what differs after
    them depends on the rows."""
    blocks = (0, 3), (3, 5), (2, 6)  # they differ in their rows and in how many there are
    largest = example(batch, blocks[-1][1])
    states: list[dict[str, Any]] = []
    changed: set[str] = set()
    for start, stop in blocks:
        sample = take(largest, start, stop)
        with preserved(model) as writes, torch.no_grad(), without_dropout(model):
            before = state_of(model)
            try:
                with autocast_for(sample, autocast):
                    outputs, _ = flat_outputs(function(model, copy_of(sample)))
            except Exception:  # it does not take so few rows: nothing is known
                return Changes()
            after = state_of(model)
            parameters = dict(model.named_parameters())
            written = writes.written()
            after |= {n: parameters[n].detach().clone() for n in written}
        changed |= {n for n in after if n in written or not same(before.get(n), after[n])}
        states.append(after)
    first, *others = states
    fed = {n for n in changed if not all(same(first.get(n), s.get(n)) for s in others)}
    return Changes(tuple(sorted(changed - fed)), tuple(sorted(fed)), outputs)


def counter(model: nn.Module, function: Function, sample: Any) -> str | None:
    """An attribute that is no tensor, or a container, that another step of the same rows changes.

    What a step notes of its rows (how many there were) stays as it is; a counter does not."""
    tensors = {n for n, table, key in attributes_of(model) if isinstance(table[key], Tensor)}
    before = state_of(model)
    with torch.no_grad(), without_dropout(model):
        function(model, sample)
    after = state_of(model)
    changed = (n for n in after if n not in tensors and n in before and before[n] != after[n])
    return next(changed, None)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Buffers, and attributes that hold tensors or numbers, with copies of their values."""
    state: dict[str, Any] = {}
    for name, table, key in attributes_of(model):
        value = table[key]
        state[name] = value.detach().clone() if isinstance(value, Tensor) else content(value)
    return state


def content(value: Any, depth: int = CONTAINER_LIMITS.depth) -> Any:
    """What a container holds of numbers and tensors, to be compared with what it holds later."""
    if isinstance(value, Tensor):
        return None if value.is_meta else (tuple(value.shape), digest(value))
    if isinstance(value, CONTAINERS) and depth:
        return tuple((str(key), content(item, depth - 1)) for key, item in items_of(value))
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def close(a: Tensor, b: Tensor, limit: float, scale: float = 1.0) -> bool:
    """Whether two tensors are equal but for rounding: by `limit` of their entries, or by `limit`
    of `scale`. Counts and masks must be the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return bool(torch.allclose(a, b, rtol=limit, atol=limit * scale, equal_nan=True))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return close(a, b, 0.0)
    return type(a) is type(b) and bool(a == b)
