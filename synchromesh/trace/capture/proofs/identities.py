"""Row identities: small tensors that hold the number of the row in place of its content.

An operator that only takes entries from one place to another is tried on them, for several numbers
of rows; how the identities lie in what it makes is how the rows lie.
"""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..lay import Case, Entry, Lay

COUNTS = (2, 3, 5)  # numbers of rows; one beyond the constants of the operator is added
MOST = 1009
WAYS = 64  # combinations of ways in which the inputs lie

Run = Callable[[dict[int, Tensor], int], Any]  # identities by entry, number of rows -> the result


def identities(lay: Lay, segments: int, rank: int, rows: int) -> Tensor:
    """The numbers of rows along the dim of the rows, size 1 along all others."""
    shape = [-1 if d == lay.dim else 1 for d in range(rank)]
    return line(lay.count, segments, rows).reshape(shape)


def line(count: int, segments: int, rows: int) -> Tensor:
    """segments x rows x inner numbers of rows."""
    return torch.arange(rows).repeat_interleave(count // segments).repeat(segments)


def read(found: Tensor, lay: Lay, rows: int) -> int | None:
    """In how many segments the identities lie; None where they lie otherwise."""
    lines = found.movedim(lay.dim, -1).reshape(-1, found.shape[lay.dim])
    if lines.shape[1] != lay.count * rows or not bool((lines == lines[:1]).all()):
        return None
    for segments in sorted(lay.any.segments):
        if torch.equal(lines[0], line(lay.count, segments, rows)):
            return segments
    return None


def evaluated(case: Case, run: Run, entries: list[Entry]) -> Lay | None:
    """The lay that `run` shows whatever the number of rows, None where it shows none.

    entries: those whose identities `run` takes, all with rows.
    """
    ways = [sorted(e.lay.segments) for e in entries]
    if prod(map(len, ways)) > WAYS:
        ways = [w[:1] for w in ways]
    shown = {each for way in product(*ways) if (each := same(case, run, entries, way))}
    return case.place.as_(shown) if shown else None


def same(case: Case, run: Run, entries: list[Entry], way: tuple[int, ...]) -> int | None:
    seen = set()
    for rows in (*COUNTS, beyond(case)):
        given = {
            id(e): identities(e.lay, s, e.rank, rows) for e, s in zip(entries, way, strict=True)
        }
        try:
            with torch.no_grad():
                found = run(given, rows)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None  # it does not work on dimensions of size 1
        if isinstance(found, tuple | list):
            found = found[case.at]
        line = Lay(case.place.dim, case.place.count, frozenset())
        seen.add(read(found, line, rows) if found.dim() == case.rank else None)
    return seen.pop() if len(seen) == 1 else None


def beyond(case: Case) -> int:
    """A number of rows above all constants of the operator, where that is possible."""
    return min(MOST, 2 + max((abs(c) for c in constants(case.arguments)), default=5))


def constants(given: Any) -> Iterator[int]:
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for each in given:
            yield from constants(each)
    elif isinstance(given, int) and not isinstance(given, bool) and abs(given) < MOST:
        yield given
