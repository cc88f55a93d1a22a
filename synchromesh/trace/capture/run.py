"""A run of the whole step in one process, with the model's own parameters and buffers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.step import Step

from .export import leaves, rows_of


def run(
    step: Step,
    model: nn.Module,
    batch: Any,
    rows: int | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The step's outputs; `parameters` takes the place of the model's own."""
    return Runner(step, model, parameters)(batch, rows)


class Runner:
    """The whole graph, compiled to a GraphModule, bound to a model's parameters and buffers."""

    def __init__(
        self, step: Step, model: nn.Module, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        assert step.graph is not None, "an opaque step has no graph"
        self.module = torch.fx.GraphModule({}, step.graph)
        self.inputs = [
            (n.meta["role"], n.meta["name"]) for n in step.graph.find_nodes(op="placeholder")
        ]
        self.leaves = step.leaves
        self.held: dict[tuple[str, str], Any] = {
            ("constant", n): t for n, t in step.constants.items()
        }
        self.held |= {
            ("parameter", n): p for n, p in (parameters or dict(model.named_parameters())).items()
        }
        self.held |= {("buffer", n): b for n, b in model.named_buffers(remove_duplicate=False)}

    def __call__(self, batch: Any, rows: int | None = None) -> tuple[Tensor, ...]:
        tensors = {("leaf", leaf.name): leaf.tensor for leaf in leaves(batch)}
        given = self.held | tensors | {("rows", "rows"): rows_of(batch) if rows is None else rows}
        result: tuple[Tensor, ...] = self.module(*(given[i] for i in self.inputs))
        return result
