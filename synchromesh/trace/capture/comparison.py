"""The comparison of a trace with its model: tracing silently loses custom backwards, hooks, state.

Two steps in a row, of the fewest rows that the model takes and of an odd number of them, must
give the same loss and gradients, and leave the same buffers, attributes and parameters."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.step import Step

from .batch import autocast_for, copy_of, example
from .export import Function, line_and_reason, own_fault, quiet
from .gradients import (
    OwnLeaves,
    deterministic,
    first_gap,
    gradients,
    likely_cause,
    refuse_foreign,
    tolerance,
    without_dropout,
)
from .model_snapshot import Attributes, preserved, untraced
from .outputs import BadOutput, carried, flat_outputs
from .run import run
from .state_changes import close, counter

REMEDY = "it trains unchanged as one component under the plan 'data'"


@dataclass(frozen=True)
class SampleSizes:
    """With how many rows a trace is compared with its model. Chosen, not measured."""

    first: int = 4  # of the smallest numbers of rows that the step takes, how many are tried
    range: int = 63  # rows: how far such numbers, and an odd one above them, are looked for


SAMPLES = SampleSizes()


@dataclass(frozen=True)
class Comparison:
    """fault: a sentence where model and trace differ; least: they agree from so many rows on."""

    fault: str | None = None
    least: int = 1


@dataclass
class Outcome:
    """What steps of a model gave: outputs, carry and gradients of each, and what it keeps after
    them."""

    outputs: list[Sequence[Tensor]]
    carry: list[dict[str, Tensor]]
    gradients: list[dict[str, Tensor]]
    buffers: dict[str, Tensor]
    changed: str | None = None  # an attribute, or a parameter, that the forward changed
    cause: str = ""  # a clause: why the gradients of a trace may be others


@quiet()
def compare(
    model: nn.Module,
    function: Function,
    batch: Any,
    step: Step,
    autocast: torch.dtype | None = None,
) -> Comparison:
    """Whether model and trace agree. Dropout is off in both; the model is left as it was.

    A model on the meta device cannot be compared: its trace counts as right."""
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
        here = _fault(expected, model, step, samples, autocast)
        if here is None:
            return Comparison(None, 1 if fault is None else first or 1)
        if fault is not None or first is None:
            break
        fault = here
    return Comparison(fault or here)


def _fault(
    eager: "Outcome", model: nn.Module, step: Step, samples: Sequence[Any],
    autocast: torch.dtype | None,
) -> str | None:  # fmt: skip
    """A sentence where the trace gives something else than the model on these samples."""
    try:
        return difference(eager, model, step, samples, autocast)
    except Exception as error:
        return f"the trace does not run as its model does ({error}); {REMEDY}"


def _fault_of_ours(error: Exception) -> str:
    where, code, why = line_and_reason(error)
    return (
        f"{where} fails when it is compared with its trace ({code!r}: {why}) and not as it is, "
        f"which is a fault of Synchromesh and not of the model; {REMEDY}"
    )


def _smallest(step: Step) -> list[int]:
    """Numbers of rows to begin with, the smallest first."""
    return [n for n in range(1, 1 + SAMPLES.range) if step.takes(n)][: SAMPLES.first]


def _odd_after(first: int, step: Step) -> int:
    """An odd number of rows above `first`, an even one where the step takes no odd ones."""
    more = [n for n in range(first + 1, first + 1 + SAMPLES.range) if step.takes(n)]
    return next((n for n in more if n % 2), more[0] if more else first)


def _eager(
    model: nn.Module,
    function: Function,
    samples: Sequence[Any],
    autocast: torch.dtype | None,
    read: Container[str],
) -> Outcome:
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
        leaves = {
            n: p.detach().requires_grad_(p.requires_grad) for n, p in model.named_parameters()
        }
        trained = {n: p for n, p in leaves.items() if p.requires_grad}
        for sample, outputs, carry in zip(samples, eager.outputs, eager.carry, strict=True):
            made = run(without_chance, model, sample, parameters=leaves)
            traced, states = made[: len(step.outputs)], made[len(step.outputs) :]
            of_trace, expected = gradients(mean(traced), trained), eager.gradients.pop(0)
            limit = tolerance(outputs[0].dtype, expected, autocast)
            fault = (
                differing_loss(outputs, traced, limit)
                or differing_carry(carry, states, limit)
                or differing_gradient(expected, of_trace, limit, eager.cause)
            )
            if fault:
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


def differing_carry(
    carry: Mapping[str, Tensor], traced: Sequence[Tensor], limit: float
) -> str | None:
    """A sentence about the first leaf of the carry that is not as the model's."""
    for (name, state), x in zip(carry.items(), traced, strict=True):
        if not close(x.detach(), state, limit):
            return f"{name} of the model and of its trace differ; {REMEDY}"
    return None


def differing_gradient(
    expected: Mapping[str, Tensor], traced: Mapping[str, Tensor], limit: float, cause: str
) -> str | None:
    """A sentence about the first gradient that is not as the model's."""
    gap = first_gap(expected, traced, limit)
    if gap is None:
        return None
    name, size, largest = gap
    return (
        f"the gradient of {name} differs between the model and its trace (by "
        f"{size / (largest or 1.0):.1e} of the largest gradient, {largest:.1e}){cause}; {REMEDY}"
    )


def differing_loss(
    outputs: Sequence[Tensor], traced: Sequence[Tensor], limit: float
) -> str | None:
    """A sentence where the losses differ by more than `limit` of them."""
    expected, of_trace = float(mean(outputs)), float(mean(traced))
    gap = abs(of_trace - expected) / (abs(expected) or 1.0)
    if gap <= limit or expected == of_trace or (expected != expected and of_trace != of_trace):
        return None
    return (
        f"the loss of the model and of its trace differ (by {gap:.1e} of it): the model "
        "draws random numbers outside of torch, or keeps state from call to call; "
        f"{REMEDY}"
    )
