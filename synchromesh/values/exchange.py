"""An exchange: a value that one component makes in one layout and another reads in another; which
rank sends which part of it to which.

Each side is rows by data index and columns by placement; a route is the intersections of a
sender's boxes with a receiver's. Four ranks, from 4x1 to 2x2 with the value replicated on both
sides, two rows a rank:

    position    has rows    wants rows    is sent
        0         0 1          0 1 2 3    2 3 from 1
        1         2 3          0 1 2 3    0 1 from 0
        2         4 5          4 5 6 7    6 7 from 3
        3         6 7          4 5 6 7    4 5 from 2

Boxes are those of values with rows first: (rows, ..., segments, inner, ...)."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product, starmap, takewhile
from math import lcm, prod

from synchromesh.values.boxes import Box, Slices, intersection, local_shape, place
from synchromesh.values.component import ITEM_BYTES, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import PARTIAL, REPLICATED, Placement

Ranges = tuple[tuple[int, int], ...]  # global rows [start, stop) of each data index
Dims = tuple[tuple[int, int], ...]  # (dimension, global width) of those that are cut besides rows


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
        return Layout(len(self.rows), self.tensor, first=self.first)

    def range_at(self, position: int) -> tuple[int, int]:
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

    def boxes(self, position: int, dims: Dims) -> tuple[Box, ...]:
        """What a position has along the rows and then each of `dims`, in local order."""
        placement = self.placement
        if placement.sharded:
            placement = placement.at(1 + [dim for dim, _ in dims].index(placement.dim))
        index = self.layout.tensor_index(position)
        widths = (width for _, width in dims)
        boxes = placement.boxes((len(self.rows), *widths), self.tensor, index)
        # the rows are dealt out by shares, which a placement does not know
        return tuple((self.range_at(position), *box[1:]) for box in boxes)


@dataclass(frozen=True)
class Route:
    """What is sent: parts, by their place along the cut dimensions in the one and the other."""

    sender: int
    receiver: int
    parts: tuple[tuple[Slices, Slices], ...]


@lru_cache(maxsize=4096)
def routes(source: Side, target: Side, dims: Dims) -> tuple[Route, ...]:
    """All routes of a change; received parts are added up where the source is partial.

    Stages further ahead have those of the first ones, moved on: positions count modulo degrees."""
    ahead = min(source.first, target.first)
    ahead -= ahead % lcm(source.tensor, target.tensor)
    if ahead:
        ends = (replace(side, first=side.first - ahead) for side in (source, target))
        return tuple(
            Route(r.sender + ahead, r.receiver + ahead, r.parts) for r in routes(*ends, dims)
        )
    have = {p: source.boxes(p, dims) for p in source.layout.positions}
    want = {p: target.boxes(p, dims) for p in target.layout.positions}
    made = []
    for sender, receiver in _pairs(source, target):
        shared = filter(None, starmap(intersection, product(have[sender], want[receiver])))
        if parts := tuple(
            (place(box, have[sender]), place(box, want[receiver])) for box in shared
        ):
            made.append(Route(sender, receiver, parts))
    return tuple(made)


def _pairs(source: Side, target: Side) -> Iterator[tuple[int, int]]:
    """Who sends to whom: every receiver gets every entry once, or every partial sum of it once."""
    for i, j in _meeting(source.rows, target.rows):
        senders, receivers = source.line(i), target.line(j)
        if target.placement.kind == "P":  # the sum over receivers counts: one for each sender
            if source.placement.kind == "R":
                senders = _one_copy(senders, receivers, j)
            yield from ((q, _nearest(receivers, q)) for q in senders)
        elif source.placement.kind == "R":
            yield from ((_nearest(senders, p), p) for p in receivers)
        else:
            yield from product(senders, receivers)


def _meeting(have: Ranges, want: Ranges) -> Iterator[tuple[int, int]]:
    """Which of the one have rows in common with which of the others, in order."""
    order = sorted(range(len(want)), key=want.__getitem__)
    stops = list(accumulate((want[j][1] for j in order), max))
    for i, (start, stop) in enumerate(have):
        near = takewhile(lambda j: want[j][0] < stop, order[bisect_right(stops, start) :])  # noqa: B023
        yield from ((i, j) for j in sorted(near) if max(start, want[j][0]) < min(stop, want[j][1]))


def _nearest(line: range, position: int) -> int:
    """The position itself where it is in `line`, else one of it, dealt out in turn."""
    return position if position in line else line[position % len(line)]


def _one_copy(senders: range, receivers: range, turn: int) -> range:
    """One of equal copies, of a rank that receives too where there is one."""
    both = sorted(set(senders) & set(receivers))
    first = both[0] if both else senders[turn % len(senders)]
    return range(first, first + 1)


@dataclass(frozen=True)
class Change:
    """A value, or a gradient, on one side becomes one on the other."""

    source: Side
    target: Side

    @cached_property
    def _dims(self) -> Dims:
        sides = (s for s in (self.source, self.target) if s.placement.sharded)
        return tuple(sorted({side.placement.dim: side.width for side in sides}.items()))

    @cached_property
    def cut(self) -> tuple[int, ...]:
        return (0, *(dim for dim, _ in self._dims))

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        return routes(self.source, self.target, self._dims)

    @cached_property
    def whole(self) -> tuple[Route, ...]:
        """Routes on which all that the sender has becomes all that the receiver has, as on all
        others of this sender: it moves as it lies, whatever the order of its dimensions."""
        heard = Counter(route.receiver for route in self.routes)

        def entire(route: Route) -> bool:
            at, to = route.parts[0]
            one = heard[route.receiver] == len(route.parts) == 1
            return one and (
                at == self._all_of(self.source, route.sender)
                and to == self._all_of(self.target, route.receiver)
            )

        cut = {route.sender for route in self.routes if not entire(route)}
        return tuple(route for route in self.routes if route.sender not in cut)

    def _all_of(self, side: Side, position: int) -> Slices:
        boxes = side.boxes(position, self._dims)
        return tuple((0, n) for n in local_shape(boxes, len(self.cut)))

    @property
    def partial(self) -> bool:
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
        of = {dim: length for dim, (_, length) in zip(self.cut, slices, strict=True)}
        return [of.get(d, length) for d, length in enumerate(shape)]

    def sent_entries(self, one: Sequence[int], position: int) -> int:
        """How many entries a position sends to others. one: the shape of a row."""
        sent = (r for r in self.routes if r.sender == position != r.receiver)
        return sum(prod(self.lengths(one, to)) for r in sent for _, to in r.parts)


# What a placement means for the value and for its gradient
_VALUE = {"R": REPLICATED, "r": REPLICATED, "P": PARTIAL}
_GRADIENT = {"R": REPLICATED, "r": PARTIAL, "P": REPLICATED}


def shape_rows_first(value: Value) -> tuple[int, ...]:
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


def copies(source: Layout, target: Layout, gradient: bool) -> list[tuple[int, int]]:
    """(sender, receiver) of a value without rows, or of its gradient back. Data index j of the
    target is served by j mod data of the source, which adds up the gradients of all it serves."""
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


Border = str  # the form in which a value is there: name, mesh, placement


def border(name: str, layout: Layout, placement: Placement) -> Border:
    """A value in a form, as text, which is quicker to look up than its parts."""
    return f"{name} {layout.mesh} {placement}"


@dataclass(frozen=True)
class Exchange:
    """A value that one component makes as (source, have) and another reads as (target, want)."""

    value: Value
    have: Placement
    want: Placement
    source: Layout
    target: Layout
    flows: bool = True  # whether a gradient comes back

    @cached_property
    def made(self) -> Border:
        return border(self.value.name, self.source, self.have)

    @cached_property
    def read(self) -> Border:
        return border(self.value.name, self.target, self.want)

    @cached_property
    def crosses(self) -> bool:
        return self.source.positions != self.target.positions

    def change(self, ranges: Callable[[int], Ranges], gradient: bool) -> Change:
        """Of the value, or of its gradient back. ranges: rows of each data index, by data degree;
        a rank of another stage without rows gets one that is not its own (engine/absent.py)."""
        known = gradient, ranges(self.source.data), ranges(self.target.data)
        if known not in self._changes:
            self._changes[known] = self._change(*known)
        return self._changes[known]

    @cached_property
    def _changes(self) -> dict[tuple[bool, Ranges, Ranges], Change]:
        return {}

    def _change(self, gradient: bool, made_rows: Ranges, read_rows: Ranges) -> Change:
        if self.crosses and not gradient:  # a stand-in, the first row, where a data index has none
            first = min((a for a, b in read_rows if a < b), default=0)
            read_rows = tuple((a, b) if a < b else (first, first + 1) for a, b in read_rows)
        made = side(self.value, self.source, self.have, made_rows, gradient)
        read = side(self.value, self.target, self.want, read_rows, gradient)
        return Change(read, made) if gradient else Change(made, read)

    def copies(self, gradient: bool) -> list[tuple[int, int]]:
        return copies(self.source, self.target, gradient)

    def sent_bytes(self, ranges: Callable[[int], Ranges], gradient: bool, position: int) -> int:
        """What a position sends to other stages."""
        if self.value.rows is None:
            size = self.value.bytes(1)
            return size * sum(sender == position for sender, _ in self.copies(gradient))
        change, one = self.change(ranges, gradient), shape_rows_first(self.value)
        if position not in change.source.layout.positions:
            return 0
        return change.sent_entries(one, position) * ITEM_BYTES[self.value.dtype]
