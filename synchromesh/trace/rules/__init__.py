"""Placement rules per operator family: `choices(op)` gives every valid combination of
placements."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from synchromesh.trace.rules import (
    attention,
    convolution,
    elementwise,
    fourier,
    indexing,
    loss,
    matrix,
    normalise,
    reduce,
    views,
)
from synchromesh.trace.rules.operator import Choice, Operator, R, arguments, r

RULES: dict[str, Callable[[Operator], Iterator[Choice]]] = {
    **matrix.RULES, **attention.RULES, **convolution.RULES, **normalise.RULES, **views.RULES,
    **reduce.RULES, **indexing.RULES, **loss.RULES, **fourier.RULES,
}  # fmt: skip


def rule_of(op: Operator) -> Callable[[Operator], Iterator[Choice]] | None:
    """The rule for an operator by name, else by torch's tag for elementwise operators."""
    if op.schema is None or op.schema.name.split("::")[0] != "aten":
        return None
    if op.name in (
        "max",
        "min",
    ):  # one operator's name for three: of two tensors, along a dim, of all
        if op.overload == "other":
            return elementwise.elementwise
        return reduce.reduction if op.overload == "dim" else None
    if op.name in RULES:
        return RULES[op.name]
    pointwise = torch.Tag.pointwise in getattr(op.node.target, "tags", ())
    return elementwise.elementwise if pointwise or op.name in elementwise.NAMES else None


def choices(op: Operator) -> list[Choice]:
    """Every valid choice for the operator, each once. Replicated inputs are always among them.

    A deterministic operator on replicated inputs gives replicated outputs, and as
    vector-Jacobian products are linear in the gradient, partial gradients of the outputs give
    partial gradients of the inputs.
    """
    found = [Choice((R,) * len(op.inputs), (R,) * len(op.outputs))]
    effect = bool(op.node.meta.get("effect"))
    if not effect or op.name == "batch_norm":
        if any(o.differentiable for o in op.outputs):
            found.append(Choice((r,) * len(op.inputs), (r,) * len(op.outputs)))
        rule = rule_of(op)
        if rule is not None and all(o.shape is not None for o in op.outputs):
            found += rule(op)
    kept: dict[tuple[Any, Any], Choice] = {}
    for choice in found:
        tidy = _tidy(op, choice)
        if tidy is not None:
            kept.setdefault((tidy.inputs, tidy.outputs), tidy)
    if op.name == "batch_norm" and op.constant("training"):
        return [replace(c, replace=normalise.synchronised) for c in kept.values()]
    again = views.RELAID.get(op.name) if op.m > 1 else None
    if again is not None:  # what was moved need not lie in memory as it did
        return [c if c.replace else replace(c, replace=again) for c in kept.values()]
    return list(kept.values())


def _tidy(op: Operator, choice: Choice) -> Choice | None:
    """The choice with `r` where a gradient flows only; None if a tensor cannot be in its state."""
    flows = any(o.differentiable for o in op.outputs)
    inputs = tuple(
        R if s.kind == "r" and not (flows and x.differentiable) else s
        for s, x in zip(choice.inputs, op.inputs, strict=True)
    )
    outputs = tuple(
        R if s.kind == "r" and not o.differentiable else s
        for s, o in zip(choice.outputs, op.outputs, strict=True)
    )
    pairs = [*zip(inputs, op.inputs, strict=True), *zip(outputs, op.outputs, strict=True)]
    if not all(x.allows(s, op.m) for s, x in pairs):
        return None
    return replace(choice, inputs=inputs, outputs=outputs)


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def draws(node: Node) -> bool:
    """Whether the node draws random numbers."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name = schema.name.split("::")[1]
    given = arguments(node)
    if name == "scaled_dot_product_attention":
        return bool(given.get("dropout_p", 0.0))
    if name in RECURRENT:
        return bool(given.get("dropout") and given.get("train") and given.get("num_layers") != 1)
    if "dropout" in name:
        return bool(given.get("p", 0.5) and given.get("train", given.get("training", True)))
    return True


__all__ = ["RULES", "Choice", "Operator", "choices", "draws", "rule_of"]
