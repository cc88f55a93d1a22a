"""Proofs by trial: an operator is run on small tensors, for several numbers of rows.

One that only takes entries from one place to another is run on row identities, which hold the
number of the row in place of its content: how they lie in what it makes is how the rows lie.

The last resort, for an operator of no known family, are random tensors: of three rows it must
compute what it computes of the first alone, and of the other two."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from synchromesh.trace import meta

from ..known_values import evaluate
from ..row_layout import Case, IrregularRows, RowLayout, RowOperand

Run = Callable[[dict[int, Tensor], int], Any]  # identities by operand, rows -> the result


@dataclass(frozen=True)
class TrialSizes:
    """On how much an operator is tried. Chosen, not measured."""

    rows: tuple[int, ...] = (2, 3, 5)  # of identities, and a number beyond all constants
    most_rows: int = 1009  # however large these constants are
    combinations: int = 64  # of the inputs' numbers of segments; one of each input where more
    of_all: int = 3  # rows of random tensors
    blocks: tuple[tuple[int, int], ...] = ((0, 1), (1, 3))  # of those rows, from and to
    most_entries: int = 2**24  # of the random tensors, all together


SIZES = TrialSizes()


def known(node: Node, rows: int) -> Tensor | None:
    """What a tensor holds that depends on the number of rows alone."""
    value = evaluate(node, {}, rows)
    return None if value is None else value.cpu()


def identities(layout: RowLayout, segments: int, rank: int, rows: int) -> Tensor:
    """The numbers of rows along the dim of the rows, size 1 along all others."""
    shape = [-1 if d == layout.dim else 1 for d in range(rank)]
    return line(layout.count, segments, rows).reshape(shape)


def line(count: int, segments: int, rows: int) -> Tensor:
    """segments x rows x inner numbers of rows."""
    return torch.arange(rows).repeat_interleave(count // segments).repeat(segments)


def read(made: Tensor, layout: RowLayout, rows: int) -> int | None:
    """In how many segments the identities lie; None where they lie otherwise."""
    lines = made.movedim(layout.dim, -1).reshape(-1, made.shape[layout.dim])
    if lines.shape[1] != layout.count * rows or not bool((lines == lines[:1]).all()):
        return None
    for segments in sorted(layout.in_any_order.segments):
        if torch.equal(lines[0], line(layout.count, segments, rows)):
            return segments
    return None


def evaluated(
    case: Case, run: Run, operands: list[RowOperand], fault: Callable[[], IrregularRows]
) -> RowLayout:
    """The layout that `run` shows whatever the number of rows; else raises a `fault`. operands:
    those with identities."""
    choices = [sorted(e.layout.segments) for e in operands]
    if prod(map(len, choices)) > SIZES.combinations:
        choices = [c[:1] for c in choices]
    shown = {n for each in product(*choices) if (n := segments_of(case, run, operands, each))}
    if not shown:
        raise fault()
    return case.result.with_segments(shown)


def segments_of(
    case: Case, run: Run, operands: list[RowOperand], given: tuple[int, ...]
) -> int | None:
    """In how many segments the rows of the result lie, where those of the operands lie in `given`
    segments; None where that depends on the number of rows, or they lie otherwise."""
    seen, pairs = set(), list(zip(operands, given, strict=True))
    largest = max(map(abs, constants(case.arguments)), default=5)
    beyond = min(SIZES.most_rows, 2 + largest)  # all constants, where that is possible
    for rows in (*SIZES.rows, beyond):
        tensors = {id(e): identities(e.layout, s, e.rank, rows) for e, s in pairs}
        try:
            with torch.no_grad():
                made = run(tensors, rows)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # it does not work on dimensions of size 1
        if isinstance(made, tuple | list):
            made = made[case.index]
        seen.add(read(made, case.result, rows) if made.dim() == case.rank else None)
    return seen.pop() if len(seen) == 1 else None


def constants(given: Any) -> Iterator[int]:
    """The integers among an operator's arguments, but for those that stand for no bound."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for each in given:
            yield from constants(each)
    elif isinstance(given, int) and not isinstance(given, bool) and abs(given) < SIZES.most_rows:
        yield given


def tried(case: Case) -> RowLayout:
    """The layout that the inputs have in common, if what is made of blocks confirms it."""
    regular = [e for e in case.with_rows if isinstance(e.rows, RowLayout)]
    if not regular or sum(prod(e.shape(SIZES.of_all)) for e in case.operands) > SIZES.most_entries:
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
    of_all = run(case, drawn, SIZES.of_all)
    for start, stop in SIZES.blocks:
        inputs = {
            id(e): rows_between(drawn[id(e)], e.rows, segments, start, stop)
            if isinstance(e.rows, RowLayout)
            else drawn[id(e)]
            for e in case.operands
        }
        made = run(case, inputs, stop - start)
        wanted = rows_between(of_all, case.result, segments, start, stop)
        if not torch.allclose(made.double(), wanted.double(), 1e-9, 1e-9, equal_nan=True):
            return False
    return True


def random_of(operand: RowOperand, generator: torch.Generator) -> Tensor:
    """Random entries for an operand, zeros and ones for counts and masks."""
    val, shape = meta.val(operand.node), operand.shape(SIZES.of_all)
    if val.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(0, 2, shape, generator=generator).to(val.dtype)


def rows_between(x: Tensor, layout: RowLayout, segments: int, start: int, stop: int) -> Tensor:
    apart: Tensor = x.unflatten(layout.dim, (segments, SIZES.of_all, layout.count // segments))
    part = apart.narrow(layout.dim + 1, start, stop - start)
    return part.flatten(layout.dim, layout.dim + 2)


def run(case: Case, tensors: dict[int, Tensor], rows: int) -> Any:
    """The operator on these tensors; what depends on the number of rows alone is computed."""

    def tensor(operand: RowOperand) -> Tensor:
        if operand.rows is None or isinstance(operand.rows, RowLayout):
            return tensors[id(operand)]
        made = known(operand.node, rows)
        if made is None:
            raise operand.rows
        return made

    with torch.no_grad():
        made = case.apply(tensor, rows, plain)
    return made[case.index] if isinstance(made, tuple | list) else made


def plain(argument: Any) -> Any:
    """Trials are on the processor, in double precision."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    double = isinstance(argument, torch.dtype) and argument.is_floating_point
    return torch.float64 if double else argument
