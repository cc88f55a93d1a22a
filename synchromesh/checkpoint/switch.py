"""A switch: tensors move from one set of boxes to another, a few megabytes at a time.

Every rank knows the boxes of all ranks, so each computes the same list of chunks and the same
rounds of at most 16 MB per rank; nothing is negotiated. A tensor's old shard is freed as soon
as its new one is complete; shrinking tensors go first (the smallest first) and growing ones
last (the largest first), so that memory stays near that of the larger of the two layouts."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from synchromesh.checkpoint.local_tensor import box_view, local_shape, split
from synchromesh.engine.groups import Group
from synchromesh.values.placement import Box
from synchromesh.values.transfer import BoxCopy, transfer, volume

ROUND_BYTES = 16 * 2**20  # that one rank sends and receives at once
CHUNK_BYTES = ROUND_BYTES // 4

Sides = Sequence[Sequence[Box]]  # boxes of each rank of the group


@dataclass
class Move:
    """One tensor that changes its boxes: `replace` drops the old local tensor for the new one."""

    name: str
    shape: tuple[int, ...]
    have: Sides
    want: Sides
    current: Callable[
        [], Tensor
    ]  # the local tensor; an empty one of its dtype where there is none
    replace: Callable[[Tensor], None]

    @property
    def before(self) -> int:
        """Elements of all ranks' boxes before the move."""
        return sum(volume(box) for boxes in self.have for box in boxes)

    @property
    def after(self) -> int:
        """Elements of all ranks' boxes after it."""
        return sum(volume(box) for boxes in self.want for box in boxes)

    @property
    def changes(self) -> bool:
        """Whether any rank's boxes change."""
        return [list(boxes) for boxes in self.have] != [list(boxes) for boxes in self.want]


@dataclass(frozen=True)
class Moved:
    """What a switch took: seconds of pause, bytes that all ranks sent together, the most that one
    of them sent or received."""

    seconds: float
    bytes: int
    most: int


@dataclass(frozen=True)
class TransferStats:
    """Bytes that this rank sent and received in a switch."""

    sent: int
    received: int


@dataclass
class _Open:
    """A move under way: its old and new local tensors on this rank."""

    move: Move
    old: Tensor
    new: Tensor
    kept: bool  # this rank's boxes do not change


@dataclass
class _Round:
    """Chunks that are exchanged at once, and the moves that are complete after them."""

    chunks: list[tuple[int, BoxCopy]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    load: dict[int, int] = field(default_factory=dict)  # bytes that each rank sends and receives


def move(moves: Iterable[Move], group: Group) -> TransferStats:
    """Carries out `moves`, which every rank of the group lists alike. Collective."""
    sent = received = 0
    ordered = in_order(m for m in moves if m.changes)
    opened: dict[int, _Open] = {}
    for batch in _rounds(ordered):
        for i in batch.begins:
            opened[i] = _begin(ordered[i], group.index)
        out, in_ = _exchange(batch, opened, group)
        sent, received = sent + out, received + in_
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
        grows = m.after > m.before
        return grows, -m.after if grows else m.before, m.name

    return sorted(moves, key=key)


def _rounds(moves: Sequence[Move]) -> Iterator[_Round]:
    """The chunks of all moves in rounds, computed from the boxes alone: equal on every rank.

    A round ends before any rank would send and receive more than 16 MB in it, and after moves
    whose new tensors have come to 16 MB on some rank: their old ones are not kept longer."""
    batch, opened = _Round(), 0
    for i, m in enumerate(moves):
        item = m.current().element_size()
        batch.begins.append(i)
        for part in transfer(m.have, m.want):
            if part.stays:
                batch.chunks.append((i, part))
                continue
            for box in split(part.box, CHUNK_BYTES // item):
                size = volume(box) * item
                ends = (part.source, part.target)
                if max(batch.load.get(r, 0) for r in ends) + size > ROUND_BYTES:
                    yield batch
                    batch = _Round()
                batch.chunks.append((i, BoxCopy(part.source, part.target, box)))
                for r in ends:
                    batch.load[r] = batch.load.get(r, 0) + size
        batch.ends.append(i)
        opened += item * max(sum(map(volume, boxes)) for boxes in m.want)
        if opened > ROUND_BYTES:
            yield batch
            batch, opened = _Round(), 0
    if batch.begins or batch.chunks or batch.ends:
        yield batch


def _begin(m: Move, index: int) -> _Open:
    old = m.current().detach()
    kept = list(m.have[index]) == list(m.want[index])
    new = old if kept else old.new_empty(local_shape(m.want[index], len(m.shape)))
    return _Open(m, old, new, kept)


def _exchange(batch: _Round, opened: dict[int, _Open], group: Group) -> tuple[int, int]:
    """Sends, receives and copies the chunks of a round; returns the bytes sent and received."""
    me = group.index
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    landing: list[tuple[Tensor, Tensor]] = []
    for i, part in batch.chunks:
        if me not in (part.source, part.target):
            continue
        state = opened[i]
        if part.source == me:
            source = box_view(state.old, state.move.have[me], part.box)
        if part.target == me:
            target = box_view(state.new, state.move.want[me], part.box)
        if part.stays:
            if not state.kept:
                target.copy_(source)
        elif part.source == me:
            sends.append((part.target, source.contiguous()))
        else:
            buffer = (
                target
                if target.is_contiguous()
                else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            receives.append((part.source, buffer))
            if buffer is not target:
                landing.append((target, buffer))
    group.exchange(sends, receives)
    for target, buffer in landing:
        target.copy_(buffer)
    sent, received = (sum(x.nbytes for _, x in side) for side in (sends, receives))
    return sent, received
