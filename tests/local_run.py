"""A run of a partition with one layout on threads: loss and whole gradients, and what was sent."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.capture.batch import leaves, rows_of
from synchromesh.trace.partition.partition import Partition
from synchromesh.trace.step import Step
from synchromesh.values.component import Value
from synchromesh.values.placement import Placement
from tests.threads import ThreadAxis, ThreadGroup, join, part, spin


def held(whole: Tensor, state: Placement, group: ThreadGroup) -> Tensor:
    """This rank's part of a parameter or buffer, a leaf of its own."""
    mine = (
        part(whole.detach(), state, group.size, group.index) if state.sharded else whole.detach()
    )
    return mine.clone()


def forward(
    step: Step, found: Partition, axis: ThreadAxis, tensors: Mapping[str, Tensor], batch: Any
) -> list[Tensor]:
    """The step's outputs on one rank; every border move is made once."""
    rows = rows_of(batch)
    values: dict[tuple[str, Placement], Tensor] = {
        (leaf.name, Placement("R")): leaf.tensor for leaf in leaves(batch)
    }
    for c in found.components:
        inputs = []
        for item in c.inputs:
            key = (item.value.name, item.want)
            if key not in values:
                have = values[item.value.name, item.have]
                values[key] = axis.move(have, str(item.have), str(item.want))
            inputs.append(values[key])
        rest = [tensors[n] for n in (*c.parameters, *c.buffers)] + [
            step.constants[v.name] for v in c.constants
        ]
        made = c.graph(axis, rows, *inputs, *rest)
        for out, x in zip(c.outputs, made, strict=True):
            check_shape(out.value, out.placement, x, rows, axis)
            values[out.value.name, out.placement] = x
    return [values[o.value.name, o.placement] for o in found.outputs]


def check_shape(value: Value, state: Placement, x: Tensor, rows: int, axis: ThreadAxis) -> None:
    shape = list(value.shape)
    if value.rows:
        shape[value.rows.dim] *= rows
    assert tuple(x.shape) == state.local_shape(tuple(shape), axis.size, axis.index), (
        f"{value} in {state}: {tuple(x.shape)}"
    )


def placements(found: Partition) -> dict[str, Placement]:
    return {name: state for (name, _), state in found.placements.items()}


def run(
    step: Step, found: Partition, model: nn.Module, batch: Any, backward: bool = True
) -> tuple[list[Any], list[ThreadGroup]]:
    """Per rank: outputs, and gradients by parameter, assembled to whole ones; buffers after the
    step."""
    size = found.components[0].layout.tensor
    states = placements(found)
    wholes = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    groups: list[ThreadGroup] = [None] * size  # type: ignore[list-item]

    def rank(group: ThreadGroup) -> Any:
        groups[group.index] = group
        tensors = {n: held(wholes[n], s, group) for n, s in states.items()}
        for n, p in model.named_parameters():
            if n in tensors:
                tensors[n].requires_grad_(p.requires_grad)
        outputs = forward(step, found, ThreadAxis(group), tensors, batch)
        if step.targets:  # the pair stands for a mean
            outputs = [outputs[0] / outputs[1]]
        if backward:
            outputs[0].backward()
        gradients = {
            n: torch.zeros_like(t) if t.grad is None else t.grad
            for n, t in tensors.items()
            if t.requires_grad
        }
        return [o.detach() for o in outputs], gradients, tensors

    return spin(size, rank), groups


def assembled(parts: list[Tensor], state: Placement) -> Tensor:
    """The whole gradient from what the ranks have."""
    if state.sharded:
        return join(parts, state)
    return torch.stack(parts).sum(0) if state.kind == "r" else parts[0]


def joined(parts: list[Tensor], state: Placement) -> Tensor:
    return join(parts, state) if state.sharded else parts[0]
