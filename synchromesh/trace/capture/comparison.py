"""The comparison of a trace with its model: tracing silently loses custom backwards, hooks, state.

Two steps in a row, of the fewest rows that the model takes and of an odd number of them, must
give the same loss and gradients, and leave the same buffers, attributes and parameters."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.step import Step

from .batch import autocast_for, copy_of, example, take
from .export import Function, line_and_reason, own_fault, quiet
from .gradients import (
    OwnLeaves,
    deterministic,
    gradients,
    largest_entry,
    largest_gap,
    likely_cause,
    refuse_foreign,
    tolerance,
    without_dropout,
)
from .known_values import digest
from .model_snapshot import (
    CONTAINER_LIMITS,
    CONTAINERS,
    Attributes,
    attributes_of,
    items_of,
    preserved,
    untraced,
)
from .outputs import BadOutput, carried, flat_outputs, reported
from .run import run

Tensors = Mapping[str, Tensor]
REMEDY = "it trains unchanged as one component, whose rows are divided under the plan 'data'"


@dataclass(frozen=True)
class Comparison:
    """fault: a sentence where model and trace differ; least: they agree from so many rows on."""

    fault: str | None = None
    least: int = 1


@dataclass
class Outcome:
    """What steps of a model gave, each, and what it keeps after them."""

    outputs: list[Sequence[Tensor]]
    carry: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    changed: str | None = None  # an attribute, or a parameter, that the forward changed
    cause: str = ""  # a clause: why the gradients of a trace may be others


@quiet()
def compare(
    model: nn.Module, function: Function, batch: Any, step: Step,
    autocast: torch.dtype | None = None,
) -> Comparison:  # fmt: skip
    """Whether model and trace agree. Dropout is off in both; the model is left as it was. A model
    on the meta device cannot be compared: its trace counts as right."""
    tensors = (*model.parameters(), *model.buffers())
    if step.opaque or any(t.is_meta for t in tensors):
        return Comparison()
    fault = None
    for first in (*_smallest(step), None):
        counts = (None,) if first is None else (first, _odd_after(first, step))
        samples = [example(batch, n) for n in counts]
        try:
            expected = _eager(model, function, samples, autocast, step.constants)
        except BadOutput:
            raise
        except Exception as error:
            if first is not None:
                continue  # the model does not take so few rows, and its trace need not either
            if own_fault(model, function, samples[0], autocast):
                raise
            return Comparison(_fault_of_ours(error))
        try:
            here = difference(expected, model, step, samples, autocast)
        except Exception as error:
            here = f"the trace does not run as its model does ({error}); {REMEDY}"
        if here is None:
            return Comparison(None, 1 if fault is None else first or 1)
        if fault is not None or first is None:
            break
        fault = here
    return Comparison(fault or here)


def _fault_of_ours(error: Exception) -> str:
    where, code, why = line_and_reason(error)
    return (
        f"{where} fails when it is compared with its trace ({code!r}: {why}) and not as it is, "
        f"which is a fault of Synchromesh and not of the model; {REMEDY}"
    )


def _smallest(step: Step, count: int = 4, most: int = 63) -> list[int]:
    """Numbers of rows with which they are compared: so many, up to `most` (chosen)."""
    return [n for n in range(1, 1 + most) if step.takes(n)][:count]


def _odd_after(first: int, step: Step, reach: int = 63) -> int:
    """An odd number of rows above `first`, an even one where the step takes no odd ones."""
    more = [n for n in range(first + 1, first + 1 + reach) if step.takes(n)]
    return next((n for n in more if n % 2), more[0] if more else first)


def _eager(
    model: nn.Module, function: Function, samples: Sequence[Any], autocast: torch.dtype | None,
    read: Container[str],
) -> Outcome:  # fmt: skip
    """read: the constants of the trace, among which an attribute is state."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    outcome = Outcome([], [], [], {})
    with preserved(model) as writes, torch.enable_grad():
        before = Attributes(model)
        for sample in samples:
            with without_dropout(model), autocast_for(sample, autocast), OwnLeaves() as own:
                result = function(model, copy_of(sample))
                _, outputs = flat_outputs(result)
            refuse_foreign(outputs[0], (*model.parameters(), *own.leaves))
            outcome.cause = likely_cause(model, trained, outputs[0])
            outcome.gradients.append(gradients(mean(outputs), trained))
            outcome.outputs.append([o.detach() for o in outputs])
            outcome.carry.append(carried(result))
        outcome.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        lost = untraced(before.assigned(), read)
        changed = next((f"the parameter {n}" for n in writes.written()), lost)
        outcome.changed = changed or counter(model, function, copy_of(samples[-1]))
        return outcome


def mean(outputs: Sequence[Tensor]) -> Tensor:
    """The loss that trains: a scalar, or the quotient of a pair (sum, weight)."""
    return outputs[0] / outputs[1] if len(outputs) == 2 else outputs[0]


def difference(
    eager: Outcome, model: nn.Module, step: Step, samples: Sequence[Any],
    autocast: torch.dtype | None,
) -> str | None:  # fmt: skip
    """A sentence about the first thing in which the trace is not its model. Gradients of `eager`
    are let go of when they are compared: together they take more memory than training does."""
    without_chance = deterministic(step)
    limit = 0.0
    with preserved(model), torch.enable_grad():
        own = dict(model.named_parameters())
        leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in own.items()}
        trained = {n: p for n, p in leaves.items() if p.requires_grad}
        for sample, outputs, carry in zip(samples, eager.outputs, eager.carry, strict=True):
            made = run(without_chance, model, sample, parameters=leaves)
            first = len(step.outputs)
            traced, states = made[:first], made[first + len(step.reported) :]
            of_trace, expected = gradients(mean(traced), trained), eager.gradients.pop(0)
            limit = tolerance(outputs[0].dtype, expected, autocast)
            if fault := (
                differing_loss(outputs, traced, limit)
                or differing_carry(carry, states, limit)
                or differing_gradient(expected, of_trace, limit, eager.cause)
            ):
                return fault
            del of_trace, expected
        now = dict(model.named_buffers())
        for name, buffer in eager.buffers.items():
            if name not in now or not close(now[name].detach(), buffer, limit):
                return (
                    f"the buffer {name} is another after a step of the model than after one of "
                    f"its trace, which follows changes in place alone; {REMEDY}"
                )
    if eager.changed:
        return f"the forward changes {eager.changed}, which a trace forgets; {REMEDY}"
    return None


def differing_carry(carry: Tensors, traced: Sequence[Tensor], limit: float) -> str | None:
    for (name, state), x in zip(carry.items(), traced, strict=True):
        if not close(x.detach(), state, limit):
            return f"{name} of the model and of its trace differ; {REMEDY}"
    return None


def differing_gradient(expected: Tensors, traced: Tensors, limit: float, cause: str) -> str | None:
    """A sentence about the first gradient that is off by more than `limit` of the largest one."""
    largest = max(map(largest_entry, expected.values()), default=0.0)
    for name, gradient in expected.items():
        gap = largest_gap(traced[name], gradient) / (largest or 1.0)
        if not gap <= limit:
            return (
                f"the gradient of {name} differs between the model and its trace (by {gap:.1e} of "
                f"the largest gradient, {largest:.1e}){cause}; {REMEDY}"
            )
    return None


def differing_loss(model: Sequence[Tensor], trace: Sequence[Tensor], limit: float) -> str | None:
    """A sentence where the losses differ by more than `limit` of them."""
    expected, of_trace = float(mean(model)), float(mean(trace))
    gap = abs(of_trace - expected) / (abs(expected) or 1.0)
    if gap <= limit or expected == of_trace or (expected != expected and of_trace != of_trace):
        return None
    return (
        f"the loss of the model and of its trace differ (by {gap:.1e} of it): the model draws "
        f"random numbers outside of torch, or keeps state from call to call; {REMEDY}"
    )


# -- what a step of a model, as it is, changes of the state that the model keeps -----------


@dataclass(frozen=True)
class Changes:
    """What a step changes of the model's parameters, buffers and attributes, by name: `fed` by the
    values of its rows, `free` whatever they are. reports, outputs: the names of what its loss
    gives beside itself, and as itself."""

    free: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@quiet()
def changes(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None = None
) -> Changes:
    """What a step changes, from steps on blocks of rows that all begin in the same state."""
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
                    result = function(model, copy_of(sample))
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
    names = tuple(reported(result)), flat_outputs(result)[0]
    return Changes(tuple(sorted(changed - fed)), tuple(sorted(fed)), *names)


@quiet()
def failure(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None = None
) -> Exception | None:
    """What the function raises of a batch, as it is; the model stays as it was."""
    try:
        with preserved(model), torch.enable_grad(), autocast_for(batch, autocast):
            function(model, copy_of(batch))
    except Exception as error:
        return error
    return None


def counter(model: nn.Module, function: Function, sample: Any) -> str | None:
    """An attribute that another step of the same rows changes: a counter, no note of the rows."""
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


def close(a: Tensor, b: Tensor, limit: float) -> bool:
    """Whether two tensors are equal but for rounding, by `limit` of entries or of 1."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    return bool(torch.allclose(a, b, rtol=limit, atol=limit, equal_nan=True))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return close(a, b, 0.0)
    return type(a) is type(b) and bool(a == b)
