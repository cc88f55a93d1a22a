"""The key of a local program, equal where the same is computed on the same shapes, only there; and
what autograd keeps of a local graph, which recomputation repeats."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.local import KEEP_NOTHING, repeated, shortened
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


# -- what autograd keeps -----------------------------------------------------------------

A = torch.ops.aten
CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda x, y: (A.add.Tensor(x, y), A.add.Tensor(x, y, alpha=2), A.add.Scalar(x, 1)),
    "sub": lambda x, y: (A.sub.Tensor(x, y), A.sub.Scalar(x, 1)),
    "neg": lambda x, y: A.neg.default(x),
    "alias": lambda x, y: A.alias.default(x),
    "cat": lambda x, y: A.cat.default([x, y], 1),
    "chunk": lambda x, y: A.chunk.default(x, 2, 1),
    "clone": lambda x, y: A.clone.default(x),
    "contiguous": lambda x, y: A.contiguous.default(x.transpose(0, 1)),
    "detach": lambda x, y: A.detach.default(x),
    "expand": lambda x, y: A.expand.default(x[:, :1], [4, 6]),
    "flatten": lambda x, y: A.flatten.using_ints(x.transpose(0, 1)),
    "narrow": lambda x, y: A.narrow.default(x, 1, 0, 2),
    "permute": lambda x, y: A.permute.default(x, [1, 0]),
    "reshape": lambda x, y: A.reshape.default(x.transpose(0, 1), [24]),
    "select": lambda x, y: A.select.int(x, 1, 0),
    "slice": lambda x, y: A.slice.Tensor(x, 1, 0, 3),
    "split": lambda x, y: A.split.Tensor(x, 2, 1),
    "split_with_sizes": lambda x, y: A.split_with_sizes.default(x, [2, 4], 1),
    "squeeze": lambda x, y: A.squeeze.dim(x[:, :1], 1),
    "stack": lambda x, y: A.stack.default([x, y]),
    "t": lambda x, y: A.t.default(x),
    "to": lambda x, y: A.to.dtype(x, torch.float64),
    "transpose": lambda x, y: A.transpose.int(x, 0, 1),
    "unbind": lambda x, y: A.unbind.int(x),
    "unflatten": lambda x, y: A.unflatten.int(x, 1, [2, 3]),
    "unsqueeze": lambda x, y: A.unsqueeze.default(x, 0),
    "view": lambda x, y: A.view.default(x, [2, 12]),
}


@pytest.mark.parametrize("name", sorted(KEEP_NOTHING))
def test_operators_that_keep_nothing(name: str) -> None:
    kept: list[Tensor] = []
    x, y = (torch.randn(4, 6, requires_grad=True) for _ in range(2))
    with saved_tensors_hooks(lambda t: kept.append(t), lambda t: t):
        CALLS[name](x, y)
    assert kept == []


def test_a_walk_is_repeated_as_far_as_something_was_kept() -> None:
    graph = Graph()
    axis, x, weight = (graph.placeholder(n) for n in ("axis", "x", "weight"))
    linear = graph.call_function(A.linear.default, (x, weight))
    gelu = graph.call_function(A.gelu.default, (linear,))
    moved = graph.call_method("move", (axis, gelu, "P", "R"))
    graph.output((graph.call_function(A.add.Tensor, (moved, x)),))
    assert repeated(graph) == 5
    names = [node.name for node in shortened(graph).nodes]
    assert names == ["axis", "x", "weight", linear.name, gelu.name, "output"]


def test_a_walk_that_keeps_nothing_is_not_repeated() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(A.add.Tensor, (x, 1)),))
    assert repeated(graph) == 0
    assert [node.op for node in shortened(graph).nodes] == ["placeholder", "output"]
