"""Boxes: the parts of a tensor that ranks have, and the copies that give them other parts.

A rank's local tensor is its boxes one after the other along the one dimension in which they differ
(`place`, `local_shape`): rank 1 of 2 has rows 2-3 and 6-7 of a tensor of two segments as a local
tensor of 4 rows.

    global rows    0 1 2 3 | 4 5 6 7        local rows    2 3 6 7
    rank           0 0 1 1 | 0 0 1 1

A transfer says which rank sends which box to whom. Digits are the ranks that hold an element of a
tensor of 4 rows and 4 columns:

    have: columns over 2 ranks      want: rows over 2 ranks       copies (source -> target)
        0 0 1 1                         0 0 0 0                       0->0 0->0 1->0 1->0
        0 0 1 1                         0 0 0 0                       0->0 0->0 1->0 1->0
        0 0 1 1                         1 1 1 1                       0->1 0->1 1->1 1->1
        0 0 1 1                         1 1 1 1                       0->1 0->1 1->1 1->1

A copy whose source is its target is listed (whoever builds the new local tensor copies it) and
costs no traffic."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dimension, in global coordinates
Boxes = tuple[tuple[Box, ...], ...]  # the boxes of each rank, disjoint within a rank
Slices = tuple[tuple[int, int], ...]  # (first, length) along each dimension of a local tensor
Holders = tuple[int, ...]  # ranks that hold the same box


def volume(box: Box) -> int:
    """Elements in a box; a 0-d tensor is one box without ranges and has one element."""
    return prod(stop - start for start, stop in box)


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, n) for n in shape)


def intersection(a: Box, b: Box) -> Box | None:
    """The box that `a` and `b` share, or None where they share no element."""
    assert len(a) == len(b), f"boxes of different dimensions: {a} and {b}"
    shared = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def difference(a: Box, b: Box) -> tuple[Box, ...]:
    """`a` without `b`, as disjoint boxes: peeled off around the middle, dimension by dimension.

    a 4 x 4, b in its middle:      0 0 0 0
                                   2 . . 3
                                   2 . . 3
                                   1 1 1 1"""
    middle = intersection(a, b)
    if middle is None:
        return (a,) if volume(a) else ()
    peeled: list[Box] = []
    for d, ((start, stop), (low, high)) in enumerate(zip(a, middle, strict=True)):
        around = (middle[:d], a[d + 1 :])
        if start < low:
            peeled.append((*around[0], (start, low), *around[1]))
        if high < stop:
            peeled.append((*around[0], (high, stop), *around[1]))
    return tuple(peeled)


def without(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """What of `boxes` is in none of `others`, as disjoint boxes where these are disjoint."""
    rest = [box for box in boxes if volume(box)]
    for other in others:
        rest = [part for box in rest for part in difference(box, other)]
    return rest


def split(box: Box, most: int) -> list[Box]:
    """`box` in parts of at most `most` elements, halved along its first divisible dimension."""
    if volume(box) <= most:
        return [box]
    d = next(i for i, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[d]
    middle = (start + stop) // 2
    halves = (*box[:d], (start, middle), *box[d + 1 :]), (*box[:d], (middle, stop), *box[d + 1 :])
    return [part for half in halves for part in split(half, most)]


def join_dim(boxes: Sequence[Box]) -> int:
    """The dimension along which the local tensor of `boxes` is put together."""
    pairs = (enumerate(zip(box, boxes[0], strict=True)) for box in boxes[1:])
    differing = {d for sides in pairs for d, (side, first) in sides if side != first}
    assert len(differing) <= 1, f"boxes {boxes} differ in dimensions {sorted(differing)}"
    return differing.pop() if differing else 0


def local_shape(boxes: Sequence[Box], dims: int) -> tuple[int, ...]:
    """Shape of the local tensor of `boxes`; without boxes it is empty."""
    if not boxes:
        return (0,) * max(dims, 1)
    shape = [stop - start for start, stop in boxes[0]]
    if shape:
        d = join_dim(boxes)
        shape[d] = sum(box[d][1] - box[d][0] for box in boxes)
    return tuple(shape)


def place(box: Box, boxes: Sequence[Box]) -> Slices:
    """Where the local tensor of `boxes`, one of which contains `box`, has it."""
    joined, before = join_dim(boxes), 0
    for outer in boxes:
        if all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, box, strict=True)):
            return tuple(
                (start - a + (before if d == joined else 0), stop - start)
                for d, ((a, _), (start, stop)) in enumerate(zip(outer, box, strict=True))
            )
        before += outer[joined][1] - outer[joined][0]
    raise AssertionError(f"{box} is in none of {boxes}")


@dataclass(frozen=True, order=True)
class BoxCopy:
    """Rank `source` gives `box` (in global coordinates) to rank `target`."""

    source: int
    target: int
    box: Box

    @property
    def stays(self) -> bool:
        return self.source == self.target


def transfer(have: Sequence[Sequence[Box]], want: Sequence[Sequence[Box]]) -> tuple[BoxCopy, ...]:
    """The copies that turn `have[rank]` into `want[rank]`; both name every rank in one order.

    Every wanted element arrives exactly once, from the rank itself where it holds it, so that no
    transfer moves fewer bytes. Otherwise the holder that has least to send so far gives it (a tie
    goes to the next rank after the target), which balances what equal replicas send up to one
    copy. Deterministic: all ranks compute the same answer. ValueError where nobody holds a
    wanted element."""
    assert len(have) == len(want), f"{len(have)} ranks have, {len(want)} ranks want"
    return _transfer(_frozen(have), _frozen(want))


def lent(have: Sequence[Sequence[Box]], hosts: Sequence[Hashable]) -> Boxes:
    """What each rank keeps a copy of for others: what ranks of one host alone have, one of the
    next host does. On one host alone ranks are as hosts, of which each may be lost."""
    return _lent(_frozen(have), tuple(hosts))


@lru_cache(maxsize=4096)
def _lent(have: Boxes, hosts: tuple[Hashable, ...]) -> Boxes:
    of = hosts if len(set(hosts)) > 1 else tuple(range(len(hosts)))
    ranks_of = {host: [r for r, its in enumerate(of) if its == host] for host in dict.fromkeys(of)}
    order, kept = [*ranks_of], [list[Box]() for _ in have]
    for ranks, box in _holders(have) if len(order) > 1 else ():
        home = of[ranks[0]]
        if all(of[rank] == home for rank in ranks):
            there = ranks_of[order[(order.index(home) + 1) % len(order)]]
            kept[there[ranks_of[home].index(ranks[0]) % len(there)]].append(box)
    return tuple(map(tuple, kept))


def _frozen(boxes: Sequence[Sequence[Box]]) -> Boxes:
    return tuple(tuple(tuple((a, b) for a, b in box) for box in rank) for rank in boxes)


@lru_cache(maxsize=4096)  # a model has few distinct (shape, layout) pairs and many tensors
def _transfer(have: Boxes, want: Boxes) -> tuple[BoxCopy, ...]:
    copies: list[BoxCopy] = []
    cells: list[tuple[Holders, int, Box]] = []  # who may send, to whom, what
    held = _holders(have)
    for target, boxes in enumerate(want):
        kept = (intersection(box, own) for own in have[target] for box in boxes)
        copies += (BoxCopy(target, target, box) for box in kept if box is not None)
        for box in without(boxes, have[target]):
            cells += ((holders, target, cell) for holders, cell in _cells(box, held))
    # Where there is no choice first, then large before small: what remains evens out the loads.
    cells.sort(key=lambda c: (len(c[0]), -volume(c[2]), c[1], c[2]))
    load = [0] * len(have)
    for holders, target, cell in cells:
        source = min(holders, key=lambda h: (load[h], (h - target) % len(have)))
        load[source] += volume(cell)
        copies.append(BoxCopy(source, target, cell))
    return tuple(sorted(copies, key=lambda p: (p.target, p.box)))


def _holders(have: Boxes) -> list[tuple[Holders, Box]]:
    """Disjoint boxes that together are all that is held, each with the ranks that hold it."""
    holders_of: dict[Box, Holders] = {}
    for rank, boxes in enumerate(have):
        for box in boxes:
            if volume(box) and rank not in holders_of.get(box, ()):
                holders_of[box] = (*holders_of.get(box, ()), rank)
    parts: list[tuple[Holders, Box]] = []
    for box, ranks in sorted(holders_of.items()):
        fresh = [box]
        for i, (holders, part) in enumerate(parts):
            shared = intersection(part, box)
            if shared is None:
                continue
            parts[i] = (tuple(sorted({*holders, *ranks})), shared)
            parts += ((holders, rest) for rest in difference(part, shared))
            fresh = without(fresh, [shared])
        parts += ((ranks, rest) for rest in fresh)
    return parts


def _cells(box: Box, held: Sequence[tuple[Holders, Box]]) -> list[tuple[Holders, Box]]:
    """`box` in the parts that `held` cuts it into, with their holders."""
    shared = ((holders, intersection(box, part)) for holders, part in held)
    cells = [(holders, cell) for holders, cell in shared if cell is not None]
    if sum(volume(cell) for _, cell in cells) < volume(box):
        missing = without([box], (cell for _, cell in cells))
        raise ValueError(f"no rank holds {missing[0]} of the wanted box {box}")
    return cells
