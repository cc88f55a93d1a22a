"""Placement rules per operator family: `op_specs(op)` gives every valid combination."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from synchromesh.trace import meta
from synchromesh.trace.nodes import has_tag
from synchromesh.values.placement import Placement

from . import attention, convolution, elementwise, indexing, loss, matrix, normalise, reduce, views
from .operator import Operand, Operator, OpSpec, R, Rule, r

RULES: dict[str, Rule] = {
    **matrix.RULES, **attention.RULES, **convolution.RULES, **normalise.RULES, **views.RULES,
    **reduce.RULES, **indexing.RULES, **loss.RULES,
}  # fmt: skip


def rule_of(op: Operator) -> Rule | None:
    """The rule for an operator by name, else by torch's tag for elementwise operators."""
    if op.schema is None or op.schema.name.split("::")[0] != "aten":
        return None
    if op.name in ("max", "min"):  # a name for three: of two tensors, along a dim, of all
        if op.overload == "other":
            return elementwise.elementwise
        return reduce.reduction if op.overload == "dim" else None
    if op.name in RULES:
        return RULES[op.name]
    pointwise = has_tag(op.node, torch.Tag.pointwise)
    return elementwise.elementwise if pointwise or op.name in elementwise.NAMES else None


def op_specs(op: Operator) -> list[OpSpec]:
    """Every valid spec of the operator, each once. Replicated inputs are always among them."""
    specs: dict[tuple[Any, Any], OpSpec] = {}
    for candidate in _candidates(op):
        spec = _allowed(op, candidate)
        if spec is not None:
            specs.setdefault((spec.inputs, spec.outputs), spec)
    if op.name == "batch_norm" and op.constant("training"):
        return [replace(s, replace=normalise.synchronised) for s in specs.values()]
    strided = views.STRIDED.get(op.name) if op.m > 1 else None
    if strided is not None:  # after a move, the strides need not be those of the trace
        return [s if s.replace else replace(s, replace=strided) for s in specs.values()]
    return list(specs.values())


def _candidates(op: Operator) -> Iterator[OpSpec]:
    """All that may be valid, if sizes allow it. A deterministic operator on replicated inputs
    gives replicated outputs, and as vector-Jacobian products are linear in the gradient, partial
    gradients of the outputs give partial gradients of the inputs."""
    yield OpSpec((R,) * len(op.inputs), (R,) * len(op.outputs))
    if meta.effect(op.node) and op.name != "batch_norm":
        return
    if any(o.differentiable for o in op.outputs):
        yield OpSpec((r,) * len(op.inputs), (r,) * len(op.outputs))
    rule = rule_of(op)
    if rule is not None:
        yield from rule(op)


def _allowed(op: Operator, spec: OpSpec) -> OpSpec | None:
    """The spec with `r` where a gradient flows only; None if a tensor cannot be in its state."""
    flows = any(o.differentiable for o in op.outputs)
    inputs = _with_gradients(spec.inputs, op.inputs, flows)
    outputs = _with_gradients(spec.outputs, op.outputs)
    tensors, states = (*op.inputs, *op.outputs), (*inputs, *outputs)
    if not all(x.allows(s, op.m) for x, s in zip(tensors, states, strict=True)):
        return None
    return replace(spec, inputs=inputs, outputs=outputs)


def _with_gradients(
    states: tuple[Placement, ...], tensors: tuple[Operand, ...], flows: bool = True
) -> tuple[Placement, ...]:
    pairs = zip(states, tensors, strict=True)
    return tuple(s if s.kind != "r" or (flows and x.differentiable) else R for s, x in pairs)
