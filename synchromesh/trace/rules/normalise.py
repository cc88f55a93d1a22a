"""Rules for layer, RMS, group, instance and batch norm."""

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from synchromesh.trace.rules.operator import Choice, Emit, Operator
from synchromesh.values.placement import shard


def layer_norm(op: Operator) -> Iterator[Choice]:
    """layer_norm, rms_norm: dims in front of the normalised ones; weight and bias whole,
    gradients partial."""
    assert op.output is not None
    front = len(op.output.shape) - len(op.constant("normalized_shape"))
    for s in sorted({*op.output.states, *op.inputs[0].states}):
        if s.dim < front:
            yield op.choice({"input": s}, s)


def group_norm(op: Operator) -> Iterator[Choice]:
    """Channels, where every rank gets whole groups."""
    assert op.output is not None
    groups = op.constant("num_groups")
    for s in sorted({*op.output.states, *op.inputs[0].states}):
        if s.dim == 1 and groups % (s.segments * op.m) == 0:
            states = {"input": s, "weight": shard(0, s.segments), "bias": shard(0, s.segments)}
            yield op.choice(states, s, constants={"num_groups": groups // op.m})


def batch_norm(op: Operator) -> Iterator[Choice]:
    """Channels, with statistics and weights; per channel, so nothing else changes."""
    assert op.output is not None
    for s in sorted({*op.output.states, *op.inputs[0].states}):
        if s.dim == 1:
            own = shard(0, s.segments)
            names = ("weight", "bias", "running_mean", "running_var")
            yield op.choice({"input": s, **dict.fromkeys(names, own)}, s)


def synchronised(to: Emit, given: dict[str, Any]) -> Node:
    """Training-mode batch norm through the axis: what its statistics span is the engine's
    business."""
    names = (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
    )
    return to.method("batch_norm", *(given.get(n) for n in names))


RULES = {
    "layer_norm": layer_norm,
    "rms_norm": layer_norm,
    "group_norm": group_norm,
    "batch_norm": batch_norm,
    "instance_norm": batch_norm,
}
