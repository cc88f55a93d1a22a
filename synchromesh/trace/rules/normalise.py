"""Rules for layer, RMS, group, instance, batch and weight norm."""

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from synchromesh.trace.nodes import by_operator

from .operator import Emit, Operator, OpSpec, Rule, group_states, spread


def layer_norm(op: Operator) -> Iterator[OpSpec]:
    """layer_norm, rms_norm: dims in front of the normalised ones; weight and bias in `r`."""
    n = len(op.output.shape)
    yield from op.along(*range(n - len(op.constant("normalized_shape")), n))


def group_norm(op: Operator) -> Iterator[OpSpec]:
    """Channels, where every rank gets whole groups."""
    groups, x = op.constant("num_groups"), op.inputs[0]
    channels = x.shape[1]
    for s in group_states(groups, op.m, [(channels, x.cuts(1) | op.output.cuts(1))]):
        if s.units(groups) >= op.m:
            own = spread(s, groups, channels, 0, op.m)
            states = {"input": own.at(1), "weight": own, "bias": own}
            yield op.spec(states, own.at(1), replace=op.with_local("num_groups", groups, s))


# of batch norm, as the axis takes them
ARGUMENTS = (
    "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
)  # fmt: skip


def batch_norm(op: Operator) -> Iterator[OpSpec]:
    """Channels, with statistics and weights; per channel, so nothing else changes."""
    x = op.inputs[0]
    for s in sorted(op.output.cuts(1) | x.cuts(1)):
        if x.populated(s.at(1), op.m):
            yield op.spec({"input": s.at(1), **dict.fromkeys(ARGUMENTS[1:5], s)}, s.at(1))


def weight_norm(op: Operator) -> Iterator[OpSpec]:
    """A weight v with the lengths g: by the dim that each length belongs to (-1: one for all)."""
    v, dim = op.tensor("v"), op.constant("dim")
    if dim < 0:
        return
    for s in sorted(cut.at(dim) for cut in v.cuts(dim) | op.output.cuts(dim)):
        if v.populated(s, op.m):
            yield op.spec({"v": s, "g": s}, s)


def synchronised(to: Emit, given: dict[str, Any]) -> Node:
    """Batch norm in training through the axis: the engine decides over which rows."""
    return to.method("batch_norm", *(given.get(n) for n in ARGUMENTS))


RULES: dict[str, Rule] = by_operator({
    layer_norm: "layer_norm rms_norm",
    group_norm: "group_norm",
    batch_norm: "batch_norm instance_norm",
    weight_norm: "_weight_norm",
})  # fmt: skip
