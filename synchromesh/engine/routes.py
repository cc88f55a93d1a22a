"""Routes: which rank sends which part of a value to which, when a value changes its layout.

Each side is rows by data index and columns by placement; a route is an intersection of boxes. Four
ranks, from 4x1 to 2x2 with the value replicated on both sides, two rows a rank:

    position    has rows    wants rows    is sent
        0         0 1          0 1 2 3    2 3 from 1
        1         2 3          0 1 2 3    0 1 from 0
        2         4 5          4 5 6 7    6 7 from 3
        3         6 7          4 5 6 7    4 5 from 2

Pure: no tensors, no process groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from synchromesh.values.placement import Placement

Ranges = tuple[tuple[int, int], ...]  # global rows [start, stop) of each data index
Slices = tuple[tuple[int, int], ...]  # (first, length) along each dimension that a route cuts


@dataclass(frozen=True)
class Side:
    """How a value lies on the positions of a stage: replicated, partial or sharded."""

    tensor: int  # degree
    rows: Ranges
    placement: Placement  # R, P or S; its dim counts in the value with rows first
    width: int = 0  # global entries of the dimension that is sharded

    def rows_at(self, position: int) -> int:
        """How many rows a position has."""
        start, stop = self.rows[position // self.tensor]
        return stop - start

    def width_at(self, position: int) -> int:
        """How many entries of the sharded dimension a position has."""
        start, stop = self.placement.share(self.width, self.tensor, position % self.tensor)
        return self.placement.segments * (stop - start)

    def line(self, data_index: int) -> range:
        """The positions that share the rows of a data index."""
        return range(data_index * self.tensor, (data_index + 1) * self.tensor)

    def intervals(self, dim: int, width: int, position: int) -> list[tuple[int, int, int]]:
        """(start, stop, place in the local tensor) of what a position has of dimension `dim`."""
        if dim == 0:
            return [(*self.rows[position // self.tensor], 0)]
        if not self.placement.sharded or self.placement.dim != dim:
            return [(0, width, 0)]
        boxes = self.placement.at(0).boxes((width,), self.tensor, position % self.tensor)
        intervals, place = [], 0
        for ((start, stop),) in boxes:
            intervals.append((start, stop, place))
            place += stop - start
        return intervals


@dataclass(frozen=True)
class Route:
    """What `sender` sends to `receiver`: parts, by their place in the one's and the other's."""

    sender: int
    receiver: int
    parts: tuple[tuple[Slices, Slices], ...]


@lru_cache(maxsize=4096)
def routes(source: Side, target: Side, dims: tuple[tuple[int, int], ...]) -> tuple[Route, ...]:
    """All routes of a change; received parts are added up where the source is partial.

    dims: (dimension, global width) of everything that is cut besides rows, which are dimension 0.
    """
    made = []
    for sender, receiver in _pairs(source, target):
        cuts = [
            list(_meet(source.intervals(d, n, sender), target.intervals(d, n, receiver)))
            for d, n in ((0, 0), *dims)
        ]
        parts = tuple(
            (tuple((a, n) for a, _, n in cut), tuple((b, n) for _, b, n in cut))
            for cut in product(*cuts)
        )
        if parts:
            made.append(Route(sender, receiver, parts))
    return tuple(made)


def _meet(
    have: list[tuple[int, int, int]], want: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """(place at the sender, place at the receiver, length) of what two lists share."""
    for (a0, a1, at), (b0, b1, to) in product(have, want):
        start, stop = max(a0, b0), min(a1, b1)
        if start < stop:
            yield at + start - a0, to + start - b0, stop - start


def _pairs(source: Side, target: Side) -> Iterator[tuple[int, int]]:
    """Who sends to whom: every receiver gets every entry once, or every partial sum of it once."""
    for i, j in product(range(len(source.rows)), range(len(target.rows))):
        if max(source.rows[i][0], target.rows[j][0]) >= min(source.rows[i][1], target.rows[j][1]):
            continue
        senders, receivers = source.line(i), target.line(j)
        if target.placement.kind == "P":  # the sum over receivers counts: one for each sender
            if source.placement.kind == "R":
                both = sorted(set(senders) & set(receivers))
                first = both[0] if both else senders[j % len(senders)]
                senders = range(first, first + 1)
            for q in senders:
                yield q, q if q in receivers else receivers[q % len(receivers)]
        elif source.placement.kind == "R":  # the nearest copy
            for p in receivers:
                yield p if p in senders else senders[p % len(senders)], p
        else:
            yield from product(senders, receivers)


def nested(fine: Side, coarse: Side) -> int:
    """How many equal, non-empty row blocks of `fine` make each of `coarse`; 0: they do not."""
    count, rest = divmod(len(fine.rows), len(coarse.rows))
    lengths = {b - a for a, b in fine.rows}
    if rest or len(lengths) != 1 or 0 in lengths:
        return 0
    for j, block in enumerate(coarse.rows):
        parts = fine.rows[j * count : (j + 1) * count]
        ends = [parts[0][0], *(b for _, b in parts)]
        if (ends[0], ends[-1]) != block or ends[:-1] != [a for a, _ in parts]:
            return 0
    return count
