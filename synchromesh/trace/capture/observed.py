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
from torch.fx import Graph, Node

from synchromesh.trace import meta
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain, Rows, Value

from .batch import example, take
from .export import quiet
from .gradients import deterministic, tolerance
from .masks import is_fake
from .model_snapshot import preserved
from .run import run
from .state_changes import close

BLOCKS = (0, 7), (0, 3), (3, 7), (5, 6)  # of rows; the first is all of them


@quiet()
def observe(
    graph: Graph,
    constants: Mapping[str, Tensor],
    names: tuple[str, ...],
    model: nn.Module,
    batch: Any,
) -> None:
    """Marks values of `graph` as regular whose rows are observed to be.

    names: of the batch's leaves. Nothing can be observed of a model on the meta device.
    """
    if any(map(is_fake, (*model.parameters(), *model.buffers()))):
        return
    nodes = [n for n in graph.nodes if isinstance(meta.value(n), Value) and meta.why_irregular(n)]
    all_rows = example(batch, BLOCKS[0][1])
    step = Step(Chain(()), giving_out(graph, nodes), constants, (), names, {})
    step = deterministic(step, batch_norm=False)
    try:
        with preserved(model), torch.no_grad():
            outputs = [run(step, model, take(all_rows, *block)) for block in BLOCKS]
    except Exception:  # the graph does not take so few rows
        return
    limit = tolerance(torch.float64, dict(model.named_parameters()))
    for at, node in enumerate(nodes):
        rows = order([made[at] for made in outputs], meta.value(node), limit)
        if rows is not None:
            meta.value.set(node, replace(meta.value(node), rows=rows))
            meta.irregular.clear(node)


def giving_out(graph: Graph, nodes: Sequence[Node]) -> Graph:
    """A copy of the graph whose outputs are these nodes."""
    copy = Graph()
    copies: dict[Node, Node] = {}
    copy.graph_copy(graph, copies)
    copy.output(tuple(copies[n] for n in nodes))
    return copy


def order(values: Sequence[Tensor], value: Value, limit: float) -> Rows | None:
    """How the rows lie in a value of all rows and of the blocks, None where in no order."""
    assert value.rows is not None
    dim = value.rows.dim
    count = value.shape[dim]
    if any(v.shape[dim] != count * (b - a) for v, (a, b) in zip(values, BLOCKS, strict=True)):
        return None
    for segments in (s for s in range(1, count + 1) if count % s == 0):
        rows = Rows(dim, segments, count // segments)
        all_rows, *blocks = (rows_first(v, rows) for v in values)
        wanted = (all_rows[start:stop] for start, stop in BLOCKS[1:])
        if all(_equal(a, b, limit) for a, b in zip(wanted, blocks, strict=True)):
            return rows
    return None


def rows_first(x: Tensor, rows: Rows) -> Tensor:
    """The value with its rows first."""
    apart: Tensor = x.unflatten(rows.dim, (rows.segments, -1, rows.inner))
    return apart.movedim(rows.dim + 1, 0)


def _equal(a: Tensor, b: Tensor, limit: float) -> bool:
    return close(a, b, limit, max(1.0, float(a.abs().max())) if a.numel() else 1.0)
