"""The comparison of a trace with its model: tracing silently loses custom backwards, hooks, state.

Two steps in a row, of the fewest rows that the model takes and of an odd number of them, must
give the same loss and gradients, and leave the same buffers, attributes and parameters.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.step import Step

from .export import BadOutput, Function, example, flat_outputs, quiet, take
from .gradients import (
    casting,
    cause_of,
    custom_functions,
    gradients,
    no_dropout,
    refuse_foreign,
    tolerance,
    without_dropout,
)
from .masks import digest
from .run import run
from .undisturbed import (
    CONTAINERS,
    DEEP,
    Attributes,
    attributes_of,
    forgotten,
    items_of,
    undisturbed,
)

REMEDY = "it trains unchanged as one component under the plan 'data'"
SAMPLES = (0, 3), (3, 5), (2, 6)  # of rows, by which it is found what rows change
FEW = 4  # rows: the comparison begins with the first number up to this that the model takes


@dataclass(frozen=True)
class Comparison:
    """fault: a sentence where model and trace differ; least: they agree from so many rows on."""

    fault: str | None = None
    least: int = 1


@dataclass
class Outcome:
    """What steps gave: outputs and gradients of each, and what the model keeps after them."""

    outputs: list[Sequence[Tensor]]
    gradients: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    changed: str | None  # an attribute, or a parameter, that the forward changed
    cause: str = ""


@quiet()
def compare(
    model: nn.Module,
    function: Function,
    batch: Any,
    step: Step,
    autocast: torch.dtype | None = None,
) -> Comparison:
    """Whether model and trace agree. Dropout is off in both; the model is left as it was.

    A model on the meta device is taken on trust.
    """
    tensors = (*model.parameters(), *model.buffers())
    if step.opaque or any(t.device.type == "meta" for t in tensors):
        return Comparison()
    fault = None
    for first in (*_few(step), None):
        counts = (None,) if first is None else (first, _odd_after(first, step))
        samples = [example(batch, n) for n in counts]
        try:
            expected = _eager(model, function, samples, autocast, step.constants)
        except BadOutput:
            raise
        except Exception:
            if first is None:
                raise
            continue  # the model does not take so few rows; nor need its trace
        try:
            found = difference(expected, _traced(model, step, samples), autocast)
        except Exception as error:
            found = f"the trace does not run as its model does ({error}); {REMEDY}"
        if found is None:
            return Comparison(None, 1 if fault is None else first or 1)
        if fault is not None or first is None:
            break
        fault = found
    return Comparison(fault or found)


def _few(step: Step) -> list[int]:
    """Numbers of rows to begin with, the fewest first."""
    return [n for n in range(1, 64) if step.takes(n)][:FEW]


def _odd_after(first: int, step: Step) -> int:
    """An odd number of rows above `first`, an even one where the step takes no odd ones."""
    more = [n for n in range(first + 1, first + 64) if step.takes(n)]
    return next((n for n in more if n % 2), more[0] if more else first)


def _eager(
    model: nn.Module,
    function: Function,
    samples: Sequence[Any],
    autocast: torch.dtype | None,
    read: Container[str],
) -> Outcome:
    """read: the constants of the trace, among which an attribute is state."""
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    made: list[Sequence[Tensor]] = []
    found = []
    cause = ""
    with undisturbed(model) as writes, torch.enable_grad():
        before = Attributes(model)
        for sample in samples:
            with without_dropout(model), casting(sample, autocast):
                _, outputs = flat_outputs(function(model, sample))
            refuse_foreign(outputs[0], model.parameters())
            cause = cause_of(model, live, custom_functions(outputs[0]))
            found.append(gradients(mean(outputs), live))
            made.append([o.detach() for o in outputs])
        buffers, lost = _buffers(model), forgotten(before.assigned(), read)
        changed = next((f"the parameter {n}" for n in writes.written()), lost)
        changed = changed or counting(model, function, samples[-1])
        return Outcome(made, found, buffers, changed, cause)


def counting(model: nn.Module, function: Function, sample: Any) -> str | None:
    """An attribute that is no tensor, or a container, that another step of the same rows changes.

    What a step notes of its rows (how many there were) stays as it is; a counter does not.
    """
    tensors = {n for n, table, key in attributes_of(model) if isinstance(table[key], Tensor)}
    before = kept_by(model)
    with torch.no_grad(), without_dropout(model):
        function(model, sample)
    after = kept_by(model)
    odd = (n for n in after if n not in tensors and n in before and before[n] != after[n])
    return next(odd, None)


def _traced(model: nn.Module, step: Step, samples: Sequence[Any]) -> Outcome:
    silent = no_dropout(step)
    made: list[Sequence[Tensor]] = []
    found = []
    with undisturbed(model), torch.enable_grad():
        held = {n: p.detach().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
        live = {n: p for n, p in held.items() if p.requires_grad}
        for sample in samples:
            outputs = run(silent, model, sample, parameters=held)
            found.append(gradients(mean(outputs), live))
            made.append([o.detach() for o in outputs])
        return Outcome(made, found, _buffers(model), None)


def mean(outputs: Sequence[Tensor]) -> Tensor:
    """The loss that trains: a scalar, or the quotient of a pair (sum, weight)."""
    return outputs[0] / outputs[1] if len(outputs) == 2 else outputs[0]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {n: b.detach().clone() for n, b in model.named_buffers()}


def difference(eager: Outcome, traced: Outcome, autocast: torch.dtype | None) -> str | None:
    """A sentence about the first thing in which the trace is not its model."""
    pairs = zip(eager.outputs, traced.outputs, eager.gradients, traced.gradients, strict=True)
    for outputs, mine, expected, found in pairs:
        limit = tolerance(outputs[0], expected, autocast)
        fault = differing_loss(outputs, mine, limit) or differing_gradients(
            expected, found, limit, eager.cause
        )
        if fault:
            return fault
    limit = tolerance(eager.outputs[0][0], eager.gradients[0], autocast)
    for name, buffer in eager.buffers.items():
        other = traced.buffers.get(name)
        if other is None or not alike(other, buffer, limit):
            return (
                f"the buffer {name} is another after a step of the model than after one of its "
                f"trace, which follows changes in place alone; {REMEDY}"
            )
    if eager.changed:
        return f"the forward changes {eager.changed}, which a trace forgets; {REMEDY}"
    return None


def alike(a: Tensor, b: Tensor, limit: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    wide = torch.complex128 if a.is_complex() else torch.float64
    return bool(torch.allclose(a.to(wide), b.to(wide), rtol=limit, atol=limit, equal_nan=True))


def differing_loss(
    outputs: Sequence[Tensor], traced: Sequence[Tensor], limit: float
) -> str | None:
    expected, found = mean(outputs), mean(traced)
    gap = relative(found, expected, float(expected.detach().abs()))
    if gap <= limit or (bool(expected.isnan()) and bool(found.isnan())):
        return None
    return (
        f"the loss of the model and of its trace differ (by {gap:.1e} of it): the model "
        "draws random numbers outside of torch, or keeps state from call to call; "
        f"{REMEDY}"
    )


def differing_gradients(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], limit: float, cause: str
) -> str | None:
    sizes = [largest_of(g) for g in expected.values()]
    largest = max(sizes, default=0.0)
    for name, gradient in expected.items():
        gap = gap_of(found[name], gradient) / (largest or 1.0)
        if not gap <= limit:
            return (
                f"the gradient of {name} differs between the model and its trace (by {gap:.1e} of "
                f"the largest gradient, {largest:.1e}){cause}; {REMEDY}"
            )
    return None


def largest_of(x: Tensor) -> float:
    """The largest absolute entry that is finite."""
    found = float(x.abs().max()) if x.numel() else 0.0
    if isfinite(found):
        return found
    there = x[x.isfinite()]
    return float(there.abs().max()) if there.numel() else 0.0


def gap_of(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; entries that are finite in neither are alike."""
    found = float((a - b).abs().max()) if a.numel() else 0.0
    if isfinite(found):
        return found
    there = b.isfinite()
    return largest_of(a[there] - b[there]) if torch.equal(there, a.isfinite()) else inf


def relative(a: Tensor, b: Tensor, scale: float) -> float:
    if a.numel() == 0:
        return 0.0
    return float((a.detach() - b.detach()).abs().max()) / (scale or 1.0)


# -- what depends on the rows ------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """What a step changes of the model's parameters, buffers and attributes, by name: `fed` by the
    values of its rows, `free` whatever they are."""

    free: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()


@quiet()
def changes(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None = None
) -> Changes:
    """What a step of the model as it is changes.

    From steps with other rows, and other numbers of them, which begin alike: what differs after
    them is fed by rows.
    """
    whole = example(batch, SAMPLES[-1][1])
    outcomes: list[dict[str, Any]] = []
    changed: set[str] = set()
    for start, stop in SAMPLES:
        sample = take(whole, start, stop)
        with undisturbed(model) as writes, torch.no_grad(), without_dropout(model):
            before = kept_by(model)
            try:
                with casting(sample, autocast):
                    function(model, sample)
            except Exception:  # it does not take so few rows: nothing is known
                return Changes()
            after = kept_by(model)
            named = dict(model.named_parameters())
            written = writes.written()
            after |= {n: named[n].detach().clone() for n in written}
        changed |= {n for n in after if n in written or not same(before.get(n), after[n])}
        outcomes.append(after)
    first, *others = outcomes
    fed = {n for n in changed if not all(same(first.get(n), found.get(n)) for found in others)}
    return Changes(tuple(sorted(changed - fed)), tuple(sorted(fed)))


def kept_by(model: nn.Module) -> dict[str, Any]:
    """Buffers, and attributes that hold tensors or numbers, with their values of now."""
    found: dict[str, Any] = {}
    for name, table, key in attributes_of(model):
        value = table[key]
        if isinstance(value, Tensor):
            found[name] = value.detach().clone()
        elif isinstance(value, (bool, int, float)):
            found[name] = value
        else:
            found[name] = content(value)
    return found


def content(value: Any, deep: int = DEEP) -> Any:
    """What a container holds of numbers and tensors, to be compared with what it holds later."""
    if isinstance(value, Tensor):
        return None if value.is_meta else (tuple(value.shape), digest(value))
    if isinstance(value, CONTAINERS) and deep:
        return tuple((str(key), content(item, deep - 1)) for key, item in items_of(value))
    return value if isinstance(value, (bool, int, float, str)) else type(value).__name__


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return alike(a, b, 0.0)
    return type(a) is type(b) and bool(a == b)
