"""Row identities: small tensors that hold the number of the row in place of its content.

An operator that only takes entries from one place to another is tried on them, for several numbers
of rows; how the identities lie in what it makes is how the rows lie."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..row_layout import Case, RowLayout, RowOperand

Run = Callable[[dict[int, Tensor], int], Any]  # identities by operand, rows -> the result


@dataclass(frozen=True)
class TrialSizes:
    """On how much an operator is tried. Chosen, not measured."""

    rows: tuple[int, ...] = (2, 3, 5)  # and a number beyond the constants of the operator
    most_rows: int = 1009  # however large these constants are
    combinations: int = 64  # of the inputs' numbers of segments; one of each input where more


SIZES = TrialSizes()


def identities(layout: RowLayout, segments: int, rank: int, rows: int) -> Tensor:
    """The numbers of rows along the dim of the rows, size 1 along all others."""
    shape = [-1 if d == layout.dim else 1 for d in range(rank)]
    return line(layout.count, segments, rows).reshape(shape)


def line(count: int, segments: int, rows: int) -> Tensor:
    """segments x rows x inner numbers of rows."""
    return torch.arange(rows).repeat_interleave(count // segments).repeat(segments)


def read(found: Tensor, layout: RowLayout, rows: int) -> int | None:
    """In how many segments the identities lie; None where they lie otherwise."""
    lines = found.movedim(layout.dim, -1).reshape(-1, found.shape[layout.dim])
    if lines.shape[1] != layout.count * rows or not bool((lines == lines[:1]).all()):
        return None
    for segments in sorted(layout.in_any_order.segments):
        if torch.equal(lines[0], line(layout.count, segments, rows)):
            return segments
    return None


def evaluated(case: Case, run: Run, operands: list[RowOperand]) -> RowLayout | None:
    """The layout that `run` shows whatever the number of rows, None where it shows none.

    operands: those whose identities `run` takes, all with rows."""
    choices = [sorted(e.layout.segments) for e in operands]
    if prod(map(len, choices)) > SIZES.combinations:
        choices = [c[:1] for c in choices]
    shown = {n for each in product(*choices) if (n := segments_of(case, run, operands, each))}
    return case.result.with_segments(shown) if shown else None


def segments_of(
    case: Case, run: Run, operands: list[RowOperand], given: tuple[int, ...]
) -> int | None:
    """In how many segments the rows of the result lie, where those of the operands lie in `given`
    segments; None where that depends on the number of rows, or they lie otherwise."""
    seen = set()
    for rows in (*SIZES.rows, beyond(case)):
        tensors = {
            id(e): identities(e.layout, s, e.rank, rows)
            for e, s in zip(operands, given, strict=True)
        }
        try:
            with torch.no_grad():
                found = run(tensors, rows)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # it does not work on dimensions of size 1
        if isinstance(found, tuple | list):
            found = found[case.index]
        seen.add(read(found, case.result, rows) if found.dim() == case.rank else None)
    return seen.pop() if len(seen) == 1 else None


def beyond(case: Case) -> int:
    """A number of rows above all constants of the operator, where that is possible."""
    largest = max((abs(c) for c in constants(case.arguments)), default=5)
    return min(SIZES.most_rows, 2 + largest)


def constants(given: Any) -> Iterator[int]:
    """The integers among an operator's arguments, but for those that stand for no bound."""
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for each in given:
            yield from constants(each)
    elif isinstance(given, int) and not isinstance(given, bool) and abs(given) < SIZES.most_rows:
        yield given
