"""A switch: tensors move from one set of boxes to another, a few megabytes at a time.

Every rank knows the boxes of all ranks, so each computes the same list of chunks and the same
rounds of at most 16 MB per rank (`RoundSizes`); nothing is negotiated. A tensor's old shard is
freed as soon as its new one is complete; shrinking tensors go first (the smallest first) and
growing ones last (the largest first), so that memory stays near that of the larger of the two
layouts."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from synchromesh.checkpoint.local_tensor import box_view
from synchromesh.engine.groups import Group
from synchromesh.values.boxes import Box, BoxCopy, local_shape, split, transfer, volume, without

Sides = Sequence[Sequence[Box]]  # boxes of each rank of the group
Lent = list[tuple[Box, Tensor]]  # what a rank keeps for others, in tensors of their own


@dataclass(frozen=True)
class RoundSizes:
    """Bytes of the chunks in which tensors move; chosen."""

    most: int = 16 * 2**20  # that one rank sends and receives at once
    chunk: int = 4 * 2**20  # of one box copy


SIZES = RoundSizes()


@dataclass
class Move:
    """One tensor that changes its boxes: `replace` drops the old local tensor for the new one.
    lent: the last boxes of this rank's `have`, not in `current`; None: no rank has such."""

    name: str
    shape: tuple[int, ...]
    have: Sides
    want: Sides
    current: Callable[[], Tensor]  # the local tensor; where there is none, an empty one
    replace: Callable[[Tensor], None]
    lent: Lent | None = None

    @property
    def changes(self) -> bool:
        have, want = ([list(boxes) for boxes in sides] for sides in (self.have, self.want))
        return self.lent is not None or have != want


@dataclass(frozen=True)
class TransferStats:
    """Bytes that this rank sent and received in a switch."""

    sent: int
    received: int


@dataclass(frozen=True)
class Moved:
    """What a switch took: seconds of pause, bytes that all ranks sent together, the most that one
    of them sent or received."""

    seconds: float
    bytes: int
    most: int

    @classmethod
    def of_ranks(cls, here: TransferStats, everyone: Group, began: float) -> "Moved":
        """Of what each rank has moved. began: as of `time.perf_counter`."""
        pairs = everyone.all_gather_json([here.sent, here.received])
        most = max(map(max, pairs))
        return cls(time.perf_counter() - began, sum(sent for sent, _ in pairs), most)


@dataclass
class _OpenMove:
    """A move under way: its old and new local tensors on this rank."""

    move: Move
    old: Tensor
    new: Tensor
    kept: bool  # this rank's boxes do not change

    @classmethod
    def begin(cls, m: Move, index: int) -> "_OpenMove":
        old = m.current().detach()
        kept = not m.lent and list(m.have[index]) == list(m.want[index])
        new = old if kept else old.new_empty(local_shape(m.want[index], len(m.shape)))
        return cls(m, old, new, kept)

    def given(self, part: BoxCopy) -> Tensor:
        boxes, lent = self.move.have[part.source], self.move.lent or []
        for box, tensor in lent:
            if not without([part.box], [box]):
                return box_view(tensor, [box], part.box)
        return box_view(self.old, boxes[: len(boxes) - len(lent)], part.box)

    def place(self, part: BoxCopy) -> Tensor:
        return box_view(self.new, self.move.want[part.target], part.box)


@dataclass
class _Round:
    """Chunks that are exchanged at once, and the moves that are complete after them."""

    chunks: list[tuple[int, BoxCopy]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    load: Counter[int] = field(default_factory=Counter)  # bytes that a rank sends and receives

    def fits(self, part: BoxCopy, size: int) -> bool:
        busiest = max(self.load[part.source], self.load[part.target])
        return part.stays or busiest + size <= SIZES.most

    def add(self, move: int, part: BoxCopy, size: int) -> None:
        self.chunks.append((move, part))
        if not part.stays:
            self.load.update({part.source: size, part.target: size})


def move(moves: Iterable[Move], group: Group) -> TransferStats:
    """Carries out `moves`, which every rank of the group lists alike. Collective."""
    sent = received = 0
    ordered = in_order(m for m in moves if m.changes)
    opened: dict[int, _OpenMove] = {}
    for batch in _rounds(ordered):
        for i in batch.begins:
            opened[i] = _OpenMove.begin(ordered[i], group.index)
        moved = _exchange(batch, opened, group)
        sent, received = sent + moved.sent, received + moved.received
        for i in batch.ends:
            done = opened.pop(i)
            if not done.kept:
                ordered[i].replace(done.new)
            del done
    return TransferStats(sent, received)


def redistribute(
    local: Tensor, have: Sides, want: Sides, shape: tuple[int, ...], group: Group
) -> Tensor:
    """The local tensor for the boxes `want`, where `local` is that of `have`. Collective."""
    out = [local]
    move([Move("", shape, have, want, lambda: out[0], lambda new: out.__setitem__(0, new))], group)
    return out[0]


def in_order(moves: Iterable[Move]) -> list[Move]:
    """Shrinking tensors first, the smallest first; then growing ones, the largest first."""

    def key(m: Move) -> tuple[bool, int, str]:
        before, after = (sum(volume(b) for boxes in x for b in boxes) for x in (m.have, m.want))
        return after > before, -after if after > before else before, m.name

    return sorted(moves, key=key)


def _rounds(moves: Sequence[Move]) -> Iterator[_Round]:
    """The chunks of all moves in rounds, computed from the boxes alone: equal on every rank. A
    round ends before any rank would send and receive more than 16 MB in it, and after moves whose
    new tensors have come to 16 MB on some rank: their old ones are not kept longer."""
    batch, opened = _Round(), 0
    for i, m in enumerate(moves):
        item = m.current().element_size()
        batch.begins.append(i)
        for part in _chunks(m, SIZES.chunk // item):
            size = volume(part.box) * item
            if not batch.fits(part, size):
                yield batch
                batch = _Round()
            batch.add(i, part, size)
        batch.ends.append(i)
        opened += item * max(sum(map(volume, boxes)) for boxes in m.want)
        if opened > SIZES.most:
            yield batch
            batch, opened = _Round(), 0
    if batch.begins or batch.chunks or batch.ends:
        yield batch


def _chunks(m: Move, most: int) -> Iterator[BoxCopy]:
    """The copies of a move; those that are sent in parts of at most `most` elements."""
    for part in transfer(m.have, m.want):
        boxes = [part.box] if part.stays else split(part.box, most)
        yield from (replace(part, box=box) for box in boxes)


def _exchange(batch: _Round, opened: dict[int, _OpenMove], group: Group) -> TransferStats:
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    received: list[tuple[Tensor, Tensor]] = []
    for i, part in batch.chunks:
        state = opened[i]
        if part.stays and part.source == group.index:
            if not state.kept:
                state.place(part).copy_(state.given(part))
        elif part.source == group.index:
            sends.append((part.target, state.given(part).contiguous()))
        elif part.target == group.index:
            target = state.place(part)
            buffer = target if target.is_contiguous() else target.new_empty(target.shape)
            receives.append((part.source, buffer))
            received.append((target, buffer))
    group.exchange(sends, receives)
    for target, buffer in received:
        if buffer is not target:
            target.copy_(buffer)
    return TransferStats(*(sum(x.nbytes for _, x in side) for side in (sends, receives)))
