"""A check that a loss treats the rows of a batch apart and alike, as any division of them does.

mean over rows     n L(all) = sum_i L(row i)            and so for the gradients of both sides
(sum, weight)      both are sums over rows

A row is tried alone, and not only parts of the batch: labels that weigh differently may weigh
alike in parts. Gradients are compared because losses may agree where these do not: of a head that
begins with zeros every row has the same loss, whatever it weighs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from synchromesh.trace.rules import draws
from synchromesh.trace.step import Step
from synchromesh.values.component import Value

from .export import Function, flat_outputs, quiet, rows_of, take
from .gradients import casting, no_dropout, tolerance, without_dropout
from .run import run
from .undisturbed import undisturbed

PARTS = (0, 1), (1, 2), (2, 4)  # of up to four rows: forward and backward of each, and of all
SLACK = 10.0  # times what two computations of one loss may differ by: here some are added up

Outputs = Callable[[Any], Sequence[Tensor]]


@dataclass
class Sums:
    """Outputs and gradients of the first one, as sums over rows; parts add up in place."""

    outputs: list[float]
    gradients: dict[str, Tensor]
    computed: torch.dtype

    def add(self, other: "Sums") -> None:
        self.outputs = [a + b for a, b in zip(self.outputs, other.outputs, strict=True)]
        for name, gradient in other.gradients.items():
            self.gradients[name] += gradient


@quiet()
def uneven_rows(
    model: nn.Module,
    function: Function,
    batch: Any,
    step: Step,
    autocast: torch.dtype | None = None,
) -> str | None:
    """A sentence where the loss of a batch is not the mean of its rows', empty where it is; None
    where that cannot be tried.

    With batch norm in evaluation mode and without dropout, which couple rows by themselves.
    """
    live = {n: p for n, p in model.named_parameters() if p.requires_grad}
    silent = None if step.opaque else no_batch_norm(no_dropout(step))

    def outputs(sample: Any) -> Sequence[Tensor]:
        if silent is not None:
            return run(silent, model, sample)
        model.eval()
        with without_dropout(model), casting(sample, autocast):
            return flat_outputs(function(model, sample))[1]

    def one(start: int, stop: int) -> Sums:
        with undisturbed(model), torch.enable_grad():  # each begins with the same state
            return sums(outputs(take(batch, start, stop)), stop - start, live)

    rows = min(PARTS[-1][1], rows_of(batch))
    if rows < 2:
        return None
    batch = pick(batch, torch.arange(rows) * rows_of(batch) // rows)
    if draws_any(silent):
        return None  # a row alone draws other numbers than among others
    parts = [(start, min(stop, rows)) for start, stop in PARTS if start < rows]
    try:
        whole, (apart, *others) = one(0, rows), (one(*part) for part in parts)
    except Exception:  # a model that does not take so few rows
        return None
    for part in others:
        apart.add(part)
    limit = SLACK * tolerance(torch.zeros((), dtype=whole.computed), live, autocast)
    return uneven_losses(step, whole, apart, rows, limit) or uneven_gradients(whole, apart, limit)


def uneven_losses(step: Step, whole: Sums, apart: Sums, rows: int, limit: float) -> str:
    """A sentence where the outputs of all rows are not what those of parts add up to."""
    pairs = list(zip(whole.outputs, apart.outputs, strict=True))
    odd = [differ(a, b, max(abs(a), abs(b)), limit) for a, b in pairs]
    if not any(odd):
        return ""
    together, parts = pairs[odd.index(True)]
    kind = "sum" if len(pairs) == 2 else "mean"
    if len(pairs) == 1:
        together, parts = together / rows, parts / rows
    elif step.targets:  # the pair stands for a mean
        (sum_of_all, sum_of_parts), (all_, every) = pairs
        kind, together, parts = "mean", sum_of_all / (all_ or 1), sum_of_parts / (every or 1)
    return (
        f"the loss of {rows} rows ({together:.6g}) is not the {kind} of its rows' losses "
        f"({parts:.6g}): {REMEDY}"
    )


def uneven_gradients(whole: Sums, apart: Sums, limit: float) -> str:
    """The same for the gradients of the first output."""
    sizes = (float(g.abs().max()) for g in whole.gradients.values() if g.numel())
    largest = max(sizes, default=0.0)
    for name, gradient in whole.gradients.items():
        gap = float((gradient - apart.gradients[name]).abs().max()) if gradient.numel() else 0.0
        if differ(gap, 0.0, largest, limit):
            return (
                f"the gradient of {name} of a few rows is not the mean of its rows' (by "
                f"{gap:.1e}, the largest is {largest:.1e}): {REMEDY}"
            )
    return ""


REMEDY = (
    "it will differ between plans that divide rows differently. If rows weigh differently (class "
    "weights, ignore_index, padding) return (sum, weight); if they are coupled (contrastive "
    "losses), train under a plan without data parallelism"
)


def differ(a: float, b: float, scale: float, limit: float) -> bool:
    """Whether two numbers are further apart than rounding; not-a-numbers are equal."""
    if a != a:
        return b == b
    return not abs(a - b) <= limit * (scale or 1.0)


def sums(outputs: Sequence[Tensor], rows: int, live: dict[str, nn.Parameter]) -> Sums:
    """The outputs for so many rows, and the gradients of the first; a mean times its rows."""
    share = rows if len(outputs) == 1 else 1
    found: Sequence[Tensor | None] = ()
    if outputs[0].requires_grad and live:
        found = torch.autograd.grad(outputs[0] * share, list(live.values()), allow_unused=True)
    gradients = {
        n: torch.zeros_like(p) if g is None else g.to_dense().clone()
        for (n, p), g in zip(live.items(), found, strict=False)
    }
    values = [float(x.detach()) * share for x in outputs]
    return Sums(values, gradients, outputs[0].dtype)


def no_batch_norm(step: Step) -> Step:
    """The step with every batch norm in evaluation mode, or left out where it has no statistics
    but the batch's."""
    assert step.graph is not None
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(step.graph, {}))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        if node.args[3] is None:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            node.update_arg(5, False)
    return replace(step, graph=graph)


def draws_any(step: Step | None) -> bool:
    """Whether the step draws random numbers for rows, dropout that is off aside."""
    if step is None or step.graph is None:
        return False
    values = (n.meta.get("value") for n in step.graph.nodes if draws(n))
    return any(not isinstance(value, Value) or value.rows is not None for value in values)


def pick(batch: Any, rows: Tensor) -> Any:
    """These rows of the batch."""
    return pytree.tree_map(
        lambda x: x[rows.to(x.device)] if isinstance(x, Tensor) and x.dim() else x, batch
    )
