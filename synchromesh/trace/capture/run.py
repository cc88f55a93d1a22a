"""A run of the step in one process, with the model's own parameters and buffers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace import meta
from synchromesh.trace.step import Step

from .batch import leaves, rows_of
from .totals import names


def run(
    step: Step, model: nn.Module, batch: Any, rows: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return Runner(step, model, parameters)(batch, rows)


def totals_of(step: Step) -> "Runner | None":
    """What computes a block's part of the totals of a step, where it has any (`totals.py`)."""
    if step.totals is None:
        return None
    return Runner(replace(step, graph=step.totals, totals=None), nn.Module())


def leaf_values(batch: Any, rows: int, totals: "Runner | None") -> dict[str, Tensor]:
    """What the leaves of a step are for a global batch, by name: its own, and its totals."""
    own = {leaf.name: leaf.tensor for leaf in leaves(batch)}
    sums = () if totals is None else totals(batch, rows)
    return own | dict(zip(names(len(sums)), sums, strict=True))


class Runner:
    """The step's graph, compiled to a GraphModule, bound to a model's parameters and buffers."""

    def __init__(
        self, step: Step, model: nn.Module, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        assert step.graph is not None, "an opaque step has no graph"
        self.totals = totals_of(step)
        self.module = torch.fx.GraphModule({}, step.graph)
        holders = step.graph.find_nodes(op="placeholder")
        self.inputs = [(meta.role(n), meta.name(n)) for n in holders]
        tensors = {
            "constant": step.constants, "parameter": parameters or dict(model.named_parameters()),
            "buffer": dict(model.named_buffers(remove_duplicate=False)),
        }  # fmt: skip
        self.bound: dict[tuple[str, str], Any] = {
            (role, name): x for role, named in tensors.items() for name, x in named.items()
        }

    def __call__(self, batch: Any, rows: int | None = None) -> tuple[Tensor, ...]:
        rows = rows_of(batch) if rows is None else rows
        of_leaves = leaf_values(batch, rows, self.totals)
        given = self.bound | {("leaf", name): x for name, x in of_leaves.items()}
        given["rows", "rows"] = rows
        result: tuple[Tensor, ...] = self.module(*(given[i] for i in self.inputs))
        return result
