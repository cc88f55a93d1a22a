"""A check that the loss of a model without a trace gives each row of a batch the same weight, as
every division of them does.

mean over rows     n L(all) = sum_i L(row i)            and so for the gradients of both sides
(sum, weight)      both are sums over rows

Single rows are tried, and not only parts of the batch: rows of different weights may add up to the
same in parts. Gradients are compared because losses may agree where these do not: of a head that
begins with zeros every row has the same loss, whatever its weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batch import autocast_for, copy_of, pick, rows_of, take
from .export import Function, quiet
from .gradients import first_gap, gradients, tolerance, without_dropout
from .model_snapshot import preserved
from .outputs import flat_outputs

REMEDY = (
    "it will differ between plans that divide rows differently. If rows weigh differently (class "
    "weights, ignore_index, padding) return (sum, weight); if they are coupled (contrastive "
    "losses), train under a plan without data parallelism"
)


@dataclass(frozen=True)
class RowMeanTest:
    """What is tried of a loss, and how far sums may be apart. Chosen, not measured.

    parts: of up to four rows, whose outputs and gradients must add up to those of all.
    slack: times what two computations of one loss may differ by, as here several are added up.
    """

    parts: tuple[tuple[int, int], ...] = ((0, 1), (1, 2), (2, 4))
    slack: float = 10.0


TEST = RowMeanTest()


@dataclass
class Sums:
    """Outputs and gradients of the first one, as sums over rows."""

    outputs: list[float]
    gradients: dict[str, Tensor]
    computed: torch.dtype

    def add(self, other: "Sums") -> None:
        """Adds those of other rows."""
        self.outputs = [a + b for a, b in zip(self.outputs, other.outputs, strict=True)]
        for name in self.gradients:
            self.gradients[name] = self.gradients[name] + other.gradients[name]


@quiet()
def uneven_rows(
    model: nn.Module,
    function: Function,
    batch: Any,
    autocast: torch.dtype | None = None,
) -> str | None:
    """A sentence where the loss of a batch is not the mean of its rows', empty where it is; None
    where that cannot be tried.

    With batch norm in evaluation mode and without dropout, which couple rows by themselves.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def outputs(sample: Any) -> Sequence[Tensor]:
        model.eval()
        with without_dropout(model), autocast_for(sample, autocast):
            return flat_outputs(function(model, copy_of(sample)))[1]

    def sums_of(start: int, stop: int) -> Sums:
        with preserved(model), torch.enable_grad():  # each begins with the same state
            return sums(outputs(take(batch, start, stop)), stop - start, trained)

    rows = min(TEST.parts[-1][1], rows_of(batch))
    if rows < 2:
        return None
    batch = pick(batch, torch.arange(rows) * rows_of(batch) // rows)
    parts = [(start, min(stop, rows)) for start, stop in TEST.parts if start < rows]
    try:
        together, apart = sums_of(0, rows), sums_of(*parts[0])
        for part in parts[1:]:  # one at a time: all at once take more memory than training does
            apart.add(sums_of(*part))
    except Exception:  # a model that does not take so few rows
        return None
    limit = TEST.slack * tolerance(together.computed, trained, autocast)
    if fault := uneven_losses(together, apart, rows, limit):
        return fault
    if gap := first_gap(together.gradients, apart.gradients, limit):
        name, size, largest = gap
        return (
            f"the gradient of {name} of a few rows is not the mean of its rows' (by "
            f"{size:.1e}, the largest is {largest:.1e}): {REMEDY}"
        )
    return ""


def uneven_losses(together: Sums, apart: Sums, rows: int, limit: float) -> str:
    """A sentence where the outputs of all rows are not what those of parts add up to."""
    pairs = list(zip(together.outputs, apart.outputs, strict=True))
    differing = [p for p in pairs if differ(*p, max(map(abs, p)), limit)]
    if not differing:
        return ""
    of_all, of_parts = differing[0]
    kind = "sum" if len(pairs) == 2 else "mean"
    if len(pairs) == 1:
        of_all, of_parts = of_all / rows, of_parts / rows
    return (
        f"the loss of {rows} rows ({of_all:.6g}) is not the {kind} of its rows' losses "
        f"({of_parts:.6g}): {REMEDY}"
    )


def differ(a: float, b: float, scale: float, limit: float) -> bool:
    """Whether two numbers are further apart than rounding; not-a-numbers are equal, and so are
    infinities of one sign."""
    if a != a:
        return b == b
    return a != b and not abs(a - b) <= limit * (scale or 1.0)


def sums(outputs: Sequence[Tensor], rows: int, trained: dict[str, nn.Parameter]) -> Sums:
    """The outputs for so many rows, and the gradients of the first; a mean times its rows."""
    share = rows if len(outputs) == 1 else 1
    values = [float(x.detach()) * share for x in outputs]
    return Sums(values, gradients(outputs[0] * share, trained), outputs[0].dtype)
