"""Rules for layer, RMS, group, instance, batch and weight norm."""

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from synchromesh.trace.nodes import by_operator
from synchromesh.values.placement import shard

from .operator import Emit, Operator, OpSpec, Rule


def layer_norm(op: Operator) -> Iterator[OpSpec]:
    """layer_norm, rms_norm: dims in front of the normalised ones; weight and bias are
    replicated, their gradients partial."""
    n = len(op.output.shape)
    yield from op.along(*range(n - len(op.constant("normalized_shape")), n))


def group_norm(op: Operator) -> Iterator[OpSpec]:
    """Channels, where every rank gets whole groups."""
    groups = op.constant("num_groups")
    for s in sorted({*op.output.states, *op.inputs[0].states}):
        if s.dim == 1 and groups % (s.segments * op.m) == 0:
            states = {"input": s, "weight": shard(0, s.segments), "bias": shard(0, s.segments)}
            yield op.spec(states, s, constants={"num_groups": groups // op.m})


# of batch norm, as the axis takes them
ARGUMENTS = (
    "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps",
)  # fmt: skip


def batch_norm(op: Operator) -> Iterator[OpSpec]:
    """Channels, with statistics and weights; per channel, so nothing else changes."""
    for s in sorted({*op.output.states, *op.inputs[0].states}):
        if s.dim == 1:
            own = shard(0, s.segments)
            yield op.spec({"input": s, **dict.fromkeys(ARGUMENTS[1:5], own)}, s)


def weight_norm(op: Operator) -> Iterator[OpSpec]:
    """A weight v with the lengths g: by the dim that each length belongs to (-1: one for all)."""
    v, dim = op.tensor("v"), op.constant("dim")
    for n in sorted({s.segments for x in (v, op.output) for s in x.states if s.dim == dim}):
        yield op.spec({"v": shard(dim, n), "g": shard(dim, n)}, shard(dim, n))


def synchronised(to: Emit, given: dict[str, Any]) -> Node:
    """Training-mode batch norm through the axis: the engine decides over which rows its statistics
    are taken."""
    return to.method("batch_norm", *(given.get(n) for n in ARGUMENTS))


RULES: dict[str, Rule] = by_operator({
    layer_norm: "layer_norm rms_norm",
    group_norm: "group_norm",
    batch_norm: "batch_norm instance_norm",
    weight_norm: "_weight_norm",
})  # fmt: skip
