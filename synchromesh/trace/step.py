"""A step, the traced training step: one flat graph, its chain of components, and its constants."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from synchromesh.component import Chain


@dataclass(frozen=True)
class Step:
    """What `trace` found. docs/design.md has the graph's contract; `graph` is None when opaque."""

    chain: Chain
    graph: torch.fx.Graph | None
    constants: Mapping[str, Tensor]  # tensors that tracing lifted out of the code, by name
    outputs: tuple[str, ...]  # ("loss",), ("sum", "weight") or names of metrics
    leaves: tuple[str, ...]  # the batch's tensor leaves in flattening order, rows or not
    shared: Mapping[str, str]  # a parameter's other names in the model -> its first name
    reason: str = ""  # why the step is opaque

    @property
    def opaque(self) -> bool:
        return self.graph is None
