"""The proof of last resort: an operator of no known family is tried on random tensors.

Of three rows it must compute what it computes of the first alone, and of the other two."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from synchromesh.trace import meta

from ..row_layout import Case, RowLayout, RowOperand
from .indexing import known

ROWS = 3
BLOCKS = ((0, 1), (1, 3))
MOST_ENTRIES = 2**24  # of the tensors that are tried, all together: chosen, not measured


def tried(case: Case) -> RowLayout:
    """The layout that the inputs have in common, if what is made of blocks confirms it."""
    regular = [e for e in case.with_rows if isinstance(e.rows, RowLayout)]
    if not regular or sum(prod(e.shape(ROWS)) for e in case.operands) > MOST_ENTRIES:
        raise case.unproved()
    layout = case.shared_layout(regular)
    for segments in layout.segments:
        try:
            if blocks_agree(case, segments):
                return layout.with_segments({segments})
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            break  # it does not take such numbers, or not on this device
    raise case.unproved()


def blocks_agree(case: Case, segments: int) -> bool:
    """Whether the operator makes of each block of rows that block of what it makes of all."""
    generator = torch.Generator().manual_seed(0)
    drawn = {id(e): random_of(e, generator) for e in case.operands}
    of_all = run(case, drawn, ROWS)
    for start, stop in BLOCKS:
        inputs = {
            id(e): part(drawn[id(e)], e.rows, segments, start, stop)
            if isinstance(e.rows, RowLayout)
            else drawn[id(e)]
            for e in case.operands
        }
        found = run(case, inputs, stop - start)
        wanted = part(of_all, case.result, segments, start, stop)
        if not torch.allclose(found.double(), wanted.double(), 1e-9, 1e-9, equal_nan=True):
            return False
    return True


def random_of(operand: RowOperand, generator: torch.Generator) -> Tensor:
    """Random entries for an operand, zeros and ones for counts and masks."""
    val, shape = meta.val(operand.node), operand.shape(ROWS)
    if val.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=generator).to(val.dtype)


def part(x: Tensor, layout: RowLayout, segments: int, start: int, stop: int) -> Tensor:
    """The rows [start, stop)."""
    apart: Tensor = x.unflatten(layout.dim, (segments, ROWS, layout.count // segments))
    return apart[(slice(None),) * (layout.dim + 1) + (slice(start, stop),)].flatten(
        layout.dim, layout.dim + 2
    )


def run(case: Case, tensors: dict[int, Tensor], rows: int) -> Any:
    """The operator on these tensors; what depends on the number of rows alone is computed."""

    def tensor(operand: RowOperand) -> Tensor:
        if operand.rows is None or isinstance(operand.rows, RowLayout):
            return tensors[id(operand)]
        found = known(operand.node, rows)
        if found is None:
            raise operand.rows
        return found

    with torch.no_grad():
        found = case.apply(tensor, rows, plain)
    return found[case.index] if isinstance(found, tuple | list) else found


def plain(argument: Any) -> Any:
    """Trials are on the processor, in double precision."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    double = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if double else argument
