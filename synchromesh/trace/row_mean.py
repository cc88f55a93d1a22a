"""A check that a loss weighs the rows of a batch alike, as any division of rows takes for granted.

mean over rows     n L(all) = a L(first a rows) + b L(last b rows)            n = a + b
(sum, weight)      both are sums over rows
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .export import Function, example, flat_outputs, leaves, rows_of
from .gradients import undisturbed

LIMIT = 1e-3  # of the loss: above what rounding in single precision makes of it


def uneven_rows(
    model: nn.Module, function: Function, batch: Any, autocast: torch.dtype | None = None
) -> str | None:
    """None where the loss of a batch is the row-weighted mean of its parts', else a sentence.

    In evaluation mode, in which batch norm and dropout do not couple rows.
    """
    sample = example(batch)
    rows = rows_of(sample)
    first = rows // 3
    device = leaves(sample)[0].tensor.device.type
    cast = torch.autocast(device, autocast) if autocast else nullcontext()
    with undisturbed(model), torch.no_grad(), cast:
        model.eval()
        found = []
        for start, stop in ((0, rows), (0, first), (first, rows)):
            torch.manual_seed(0)  # what is drawn once for all rows is the same for their parts
            found.append(flat_outputs(function(model, take(sample, start, stop)))[1])
        whole, *parts = found
    weights = (first, rows - first) if len(whole) == 1 else (1, 1)
    total = rows if len(whole) == 1 else 1
    for value, a, b in zip(whole, *parts, strict=True):
        expected = (float(a) * weights[0] + float(b) * weights[1]) / total
        gap = abs(float(value) - expected) / max(abs(float(value)), abs(expected), 1e-30)
        if gap > LIMIT:
            return (
                f"the loss of {rows} rows ({float(value):.6g}) is not the mean of its rows' "
                f"losses ({expected:.6g} from {first} and {rows - first} of them): it will "
                "differ between plans that divide rows differently. If rows weigh differently "
                "(class weights, ignore_index, padding) return (sum, weight); if they are coupled "
                "(contrastive losses), train under a plan without data parallelism"
            )
    return None


def take(batch: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(
        lambda x: x[start:stop] if isinstance(x, Tensor) and x.dim() else x, batch
    )
