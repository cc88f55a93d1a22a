"""The key of a local program: equal where the same is computed on the same shapes, only there."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.partition import partition
from synchromesh.values.layout import Layout


class Blocks(nn.Module):
    """Three equal blocks, the first of which reads the batch, a head, and a table that is neither
    parameter nor buffer."""

    def __init__(self, width: int, table: Tensor, eps: float, mode: str) -> None:
        super().__init__()
        self.table = table
        self.mode = mode
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width, eps), nn.Linear(width, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = nn.functional.gelu(self.head(x), approximate=self.mode)
        return (x @ self.table).square().mean()


def keys(
    width: int = 8,
    length: int = 3,
    table: Tensor | None = None,
    eps: float = 1e-5,
    mode: str = "none",
    dtype: torch.dtype = torch.float32,
    frozen: str = "",
    degree: int = 1,
) -> tuple[str, ...]:
    """Of the components of such a model."""
    torch.manual_seed(0)
    model = Blocks(width, torch.ones(4, 4) if table is None else table, eps, mode).to(dtype)
    model.table = model.table.to(dtype) if table is None else model.table
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    batch = torch.randn(6, length, width, dtype=dtype)
    step = trace(model, lambda m, b: m(b), batch, training=True)
    assert not step.opaque, step.reason
    made = partition(step, [Layout(2 // degree, degree)] * len(step.chain.components), rows=6)
    return tuple(c.program for c in made.components)


@cache
def base() -> tuple[str, ...]:
    return keys()


def test_equal_blocks_share_a_key_and_equal_models_all() -> None:
    found = base()
    first, second, third, head = found
    assert second == third and len({first, second, head}) == 3, "no gradient flows to the batch"
    assert found == keys()


@pytest.mark.parametrize(
    "changed",
    [
        {"width": 16},
        {"length": 5},
        {"table": torch.ones(4, 8)},  # its shape stands nowhere else: the mean has none
        {"eps": 1e-6},
        {"mode": "tanh"},
        {"dtype": torch.float64},
        {"frozen": "head.weight"},
        {"degree": 2},
    ],
    ids=str,
)
def test_what_a_program_depends_on_changes_its_key(changed: dict[str, Any]) -> None:
    assert keys(**changed) != base()
