"""Routes: which rank sends which part of a value to which, when a value changes its layout.

Each side is rows by data index and columns by placement; a route is an intersection of boxes. Four
ranks, from 4x1 to 2x2 with the value replicated on both sides, two rows a rank:

    position    has rows    wants rows    is sent
        0         0 1          0 1 2 3    2 3 from 1
        1         2 3          0 1 2 3    0 1 from 0
        2         4 5          4 5 6 7    6 7 from 3
        3         6 7          4 5 6 7    4 5 from 2

Pure: no tensors, no process groups. Boxes are those of values with rows first: (rows, ...,
segments, inner, ...)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from synchromesh.values.component import Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement

Ranges = tuple[tuple[int, int], ...]  # global rows [start, stop) of each data index
Slices = tuple[tuple[int, int], ...]  # (first, length) along each dimension that a route cuts


@dataclass(frozen=True)
class Side:
    """How a value lies on the positions of a stage: replicated, partial or sharded."""

    tensor: int  # degree
    rows: Ranges
    placement: Placement  # R, P or S; its dim counts in the value with rows first
    width: int = 0  # global entries of the dimension that is sharded
    first: int = 0  # position of the stage

    @property
    def layout(self) -> Layout:
        """The layout, by its degrees and positions."""
        return Layout(len(self.rows), self.tensor, first=self.first)

    def range_at(self, position: int) -> tuple[int, int]:
        """[start, stop) of the rows of a position."""
        return self.rows[self.layout.data_index(position)]

    def rows_at(self, position: int) -> int:
        start, stop = self.range_at(position)
        return stop - start

    def width_at(self, position: int) -> int:
        """How many entries of the sharded dimension a position has."""
        index = self.layout.tensor_index(position)
        start, stop = self.placement.share(self.width, self.tensor, index)
        return self.placement.segments * (stop - start)

    def line(self, data_index: int) -> range:
        """The positions that share the rows of a data index."""
        start = self.first + data_index * self.tensor
        return range(start, start + self.tensor)

    def intervals(self, dim: int, width: int, position: int) -> list[tuple[int, int, int]]:
        """(start, stop, place in the local tensor) of what a position has of dimension `dim`."""
        if dim == 0:
            return [(*self.range_at(position), 0)]
        if not self.placement.sharded or self.placement.dim != dim:
            return [(0, width, 0)]
        index = self.layout.tensor_index(position)
        boxes = self.placement.at(0).boxes((width,), self.tensor, index)
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


@dataclass(frozen=True)
class Change:
    """A value, or a gradient, on one side becomes one on the other."""

    source: Side
    target: Side

    @cached_property
    def _widths(self) -> dict[int, int]:
        """Global width of each dimension that is cut besides rows."""
        sides = (s for s in (self.source, self.target) if s.placement.sharded)
        return {side.placement.dim: side.width for side in sides}

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The dimensions that are cut."""
        return (0, *sorted(self._widths))

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return routes(self.source, self.target, tuple(sorted(self._widths.items())))

    @cached_property
    def whole(self) -> tuple[Route, ...]:
        """Routes on which all that the sender has becomes all that the receiver has, as on all
        others of this sender: it moves as it lies, whatever the order of its dimensions."""
        heard = Counter(route.receiver for route in self.routes)

        def entire(side: Side, slices: Slices, position: int) -> bool:
            widths = {**self._widths, 0: side.rows_at(position)}
            if side.placement.sharded:
                widths[side.placement.dim] = side.width_at(position)
            return slices == tuple((0, widths[dim]) for dim in self.cut)

        found = {
            r
            for r in self.routes
            if heard[r.receiver] == len(r.parts) == 1
            and entire(self.source, r.parts[0][0], r.sender)
            and entire(self.target, r.parts[0][1], r.receiver)
        }
        others = {r.sender for r in self.routes if r not in found}
        return tuple(r for r in self.routes if r in found and r.sender not in others)

    @property
    def partial(self) -> bool:
        """Whether what arrives is added up."""
        return "P" in (self.source.placement.kind, self.target.placement.kind)

    def shape(self, one: Sequence[int], position: int) -> list[int]:
        """The shape at a position of the target. one: of a row, or of any number of them."""
        shape = list(one)
        if self.source.placement.sharded:
            shape[self.source.placement.dim] = self.source.width
        if self.target.placement.sharded:
            shape[self.target.placement.dim] = self.target.width_at(position)
        shape[0] = self.target.rows_at(position)
        return shape

    def lengths(self, shape: Sequence[int], slices: Slices) -> list[int]:
        """The shape of a part of a tensor of `shape`."""
        of = {dim: length for dim, (_, length) in zip(self.cut, slices, strict=True)}
        return [of.get(d, length) for d, length in enumerate(shape)]

    def sent_entries(self, one: Sequence[int], position: int) -> int:
        """How many entries a position sends to others. one: the shape of a row."""
        return sum(
            prod(self.lengths(one, to))
            for r in self.routes
            if r.sender == position != r.receiver
            for _, to in r.parts
        )


# What a placement means for the value and for its gradient
_VALUE = {"R": REPLICATED, "r": REPLICATED, "P": PARTIAL}
_GRADIENT = {"R": REPLICATED, "r": PARTIAL, "P": REPLICATED}


def shape_rows_first(value: Value) -> tuple[int, ...]:
    """The shape of one row of `value` with rows first."""
    rows, shape = value.rows, value.shape
    assert rows is not None, f"{value.name} has no rows"
    return (1, *shape[: rows.dim], rows.segments, rows.inner, *shape[rows.dim + 1 :])


def shape_of_rows(value: Value, shape: Sequence[int]) -> list[int]:
    """The shape of `value` itself. shape: with rows first, which are those of a block."""
    assert value.rows is not None, f"{value.name} has no rows"
    count, d = shape[0], value.rows.dim
    segments, inner, *behind = shape[1 + d :]
    return [*shape[1 : 1 + d], segments * count * inner, *behind]


def side(value: Value, layout: Layout, placement: Placement, rows: Ranges, gradient: bool) -> Side:
    """How a value with rows, or its gradient, lies under a layout."""
    assert value.rows is not None, f"{value.name} has no rows"
    width = 0
    if placement.sharded:
        assert placement.dim != value.rows.dim, f"{placement} shards the batch rows' dimension"
        placement = placement.at(placement.dim + (1 if placement.dim < value.rows.dim else 2))
        width = shape_rows_first(value)[placement.dim]
    kind = (_GRADIENT if gradient else _VALUE).get(placement.kind, placement)
    return Side(layout.tensor, rows, kind, width, layout.first)


def with_stand_ins(rows: Ranges) -> Ranges:
    """`rows`, with the first row of all where a data index has none."""
    first = min((a for a, b in rows if a < b), default=0)
    return tuple((a, b) if a < b else (first, first + 1) for a, b in rows)


def copies(source: Layout, target: Layout, gradient: bool) -> list[tuple[int, int]]:
    """(sender, receiver) of a value without rows from `source` to `target`, or of its gradient
    back. Data index j of the target is served by j mod data of the source, which adds up the
    gradients of all that it serves: the sum over its data ranks is that over the target's."""
    pairs = []
    for j in range(target.data):
        there = target.first + j * target.tensor
        here = source.first + j % source.data * source.tensor
        if gradient:
            pairs += [(there + t % target.tensor, here + t) for t in range(source.tensor)]
        else:
            pairs += [(here + t % source.tensor, there + t) for t in range(target.tensor)]
    return pairs


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
