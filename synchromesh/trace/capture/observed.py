"""Rows that no operator's proof finds in order, observed in what the graph makes of a few rows.

A mixture of experts sorts the tokens of all rows by expert and puts them back; the order depends
on values, so no operator alone proves that it is undone. Where the value that crosses to another
component has, of each of some blocks of the batch, the block of what it has of all, on the model's
own weights, its rows are taken for regular. Rows that do not depend on each other here may do so
in other batches (experts that drop tokens beyond a capacity): data parallelism has the same fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Rows, Value

from .export import example, quiet, take
from .gradients import no_dropout, tolerance
from .row_mean import no_batch_norm
from .rows import irregular
from .run import run
from .undisturbed import undisturbed

Node = torch.fx.Node
BLOCKS = (0, 7), (0, 3), (3, 7), (5, 6)  # the first is the whole


@quiet()
def observe(
    graph: torch.fx.Graph,
    constants: Mapping[str, Tensor],
    names: tuple[str, ...],
    model: nn.Module,
    batch: Any,
) -> None:
    """Marks values of `graph` as regular whose rows are seen to be.

    names: of the batch's leaves. Nothing is seen of a model on the meta device.
    """
    tensors = (*model.parameters(), *model.buffers())
    if any(t.is_meta or isinstance(t, torch._subclasses.FakeTensor) for t in tensors):
        return
    nodes = [n for n in graph.nodes if isinstance(n.meta.get("value"), Value) and irregular(n)]
    whole = example(batch, BLOCKS[0][1])
    shown = Step(Chain(()), only(graph, nodes), constants, (), names, {})
    silent = no_batch_norm(no_dropout(shown))
    try:
        with undisturbed(model), torch.no_grad():
            made = [run(silent, model, take(whole, *block)) for block in BLOCKS]
    except Exception:  # the graph does not take so few rows
        return
    limit = tolerance(torch.zeros((), dtype=torch.float64), dict(model.named_parameters()), None)
    for at, node in enumerate(nodes):
        rows = order([values[at] for values in made], node.meta["value"], limit)
        if rows is not None:
            node.meta["value"] = replace(node.meta["value"], rows=rows)
            del node.meta["irregular"]


def only(graph: torch.fx.Graph, nodes: Sequence[Node]) -> torch.fx.Graph:
    """A copy of the graph that gives out these nodes."""
    made = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    made.graph_copy(graph, copies)
    made.output(tuple(copies[n] for n in nodes))
    return made


def order(values: Sequence[Tensor], value: Value, limit: float) -> Rows | None:
    """How the rows lie in a value of all rows and of the blocks, None where in no order."""
    assert value.rows is not None
    dim, whole = value.rows.dim, values[0]
    count = value.shape[dim]
    if any(v.shape[dim] != count * (b - a) for v, (a, b) in zip(values, BLOCKS, strict=True)):
        return None
    for segments in (s for s in range(1, count + 1) if count % s == 0):
        rows = Rows(dim, segments, count // segments)
        blocks = zip(values[1:], BLOCKS[1:], strict=True)
        if all(alike(rows_of(whole, rows)[a:b], rows_of(v, rows), limit) for v, (a, b) in blocks):
            return rows
    return None


def rows_of(x: Tensor, rows: Rows) -> Tensor:
    """The value with its rows first."""
    apart: Tensor = x.unflatten(rows.dim, (rows.segments, -1, rows.inner))
    return apart.movedim(rows.dim + 1, 0)


def alike(a: Tensor, b: Tensor, limit: float) -> bool:
    if a.shape != b.shape or not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    size = max(1.0, float(a.abs().max())) if a.numel() else 1.0
    return bool(torch.allclose(a, b, rtol=limit, atol=limit * size, equal_nan=True))
