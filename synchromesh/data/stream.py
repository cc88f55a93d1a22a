"""A stream: an iterable data set, of which every rank takes its rows of each global batch.

A stream is divided into substreams, workers x blocks of them. Global batch k is of the substreams
of worker k mod W, each of which gives the rows of one block of it, in order:

    2 workers, 2 blocks, global batch 4

    substreams   00: a b c d e   01: f g h i     batch 0  a b | f g     batch 1  p q | r s
                 10: p q         11: r s         batch 2  c d | h i     batch 3  e   |

A data set that can shard itself (`shard(num_shards=, index=)`, as Hugging Face's) is asked to, and
a rank reads those substreams alone that its rows are of. Any other stream has one block, which
every rank reads, keeping its rows; where several workers read it, it divides itself by
`torch.utils.data.get_worker_info`, as torch wants it. How a stream is divided is decided when an
epoch begins and is part of the place in it: other ranks, or another plan, go on with the same
batches. A substream that ends leaves its rows of later batches empty."""

import copy
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as torch_worker

from synchromesh.checkpoint import json_state
from synchromesh.data.draws import draw_from, own_draws
from synchromesh.data.reading import Collate, Fault, Reading, Request
from synchromesh.engine.batches import checksum

ENDED = -1  # in place of a number of items: this substream has no more


@dataclass(frozen=True)
class StreamBlock:
    """What a request to a stream is about: the next items of the substreams of one worker."""

    epoch: int
    worker: int
    workers: int
    read: tuple[int, ...]  # items that each substream has given before, or ENDED
    states: tuple[Any, ...]  # of the data set there, where it has one


def bounds(size: int, blocks: int) -> list[tuple[int, int]]:
    """Rows [start, stop) of a global batch that each block gives."""
    return [(i * size // blocks, (i + 1) * size // blocks) for i in range(blocks)]


def division(dataset: Any, workers: int, ranks: int) -> tuple[int, int]:
    """Into how many (workers, blocks) a stream is divided for `ranks` that read different rows.

    A data set that shards itself may say how many shards it has: each substream has equally many
    of them, so there may be fewer substreams than were wanted."""
    if not hasattr(dataset, "shard"):
        return workers, 1
    shards = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    if not isinstance(shards, int):
        return workers, ranks
    blocks = ranks if shards % ranks == 0 else 1
    return max(w for w in range(1, workers + 1) if shards % (w * blocks) == 0), blocks


class Substream:
    """A part of a stream that is being read; `position` items were."""

    def __init__(self, dataset: Any, block: StreamBlock, index: int) -> None:
        """Block `index`, from the place that `block` says on. ValueError where it is shorter."""
        workers, blocks = block.workers, len(block.read)
        self._sharded = hasattr(dataset, "shard") and workers * blocks > 1
        if self._sharded:
            number = block.worker * blocks + index
            part = dataset.shard(num_shards=workers * blocks, index=number)
        else:
            part = copy.copy(dataset)  # its place is not the user's, nor that of another part
        self.epoch, self.position, self._over = block.epoch, block.read[index], False
        state = block.states[index] if block.states else None
        if state is not None:
            state = json_state.from_json(state, "the state of the stream")
        with self._undivided():
            if hasattr(part, "set_epoch"):
                part.set_epoch(block.epoch)
            if state is not None and _stateful(part):
                part.load_state_dict(state)
            self._items = iter(part)
            items: Any = self._items
            self._stateful = next((x for x in (items, part) if _stateful(x)), None)
            if state is not None and _stateful(items):
                items.load_state_dict(state)
            if state is None or self._stateful is None:
                self._skip(self.position)

    def _skip(self, count: int) -> None:
        found = sum(1 for _ in islice(self._items, count))
        if found < count:
            raise ValueError(
                f"the stream ends after {found} items, of which {count} were read before: it is "
                "not the stream that it was"
            )

    def goes_on(self, epoch: int, position: int) -> bool:
        """Whether the items from `position` on are next; behind its end there are none."""
        ended = self._over and position >= self.position
        return self.epoch == epoch and (ended or position == self.position)

    def read(self, count: int) -> list[Any]:
        """The next items, fewer at its end."""
        items: list[Any] = []
        if self._over:
            return items
        with self._undivided():
            for item in islice(self._items, count):
                items.append(item)
                self.position += 1
        self._over = len(items) < count
        return items

    def state(self) -> Any:
        """The state of the data set here, as JSON has it; None where it has none."""
        if self._stateful is None:
            return None
        return json_state.to_json(self._stateful.state_dict(), "the data set")

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """A data set that has sharded itself does not see that it is in a worker: it would shard
        itself once more."""
        before = torch_worker._worker_info
        if self._sharded:
            torch_worker._worker_info = None
        try:
            yield
        finally:
            torch_worker._worker_info = before


def _stateful(x: Any) -> bool:
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


class StreamReader(Dataset[Reading]):
    """Reads the blocks that requests are about; substreams stay open between them."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._open: dict[tuple[int, int, int, int], Substream] = {}
        self._sample: list[Any] = []  # one item, which shows the shape where there is no row

    def __getitem__(self, request: Request) -> Reading:
        """The reading of a request whose `what` is a StreamBlock; an empty one for None."""
        block: StreamBlock | None = request.what
        if block is None:
            return Reading()
        what = f"the stream from item {sum(n for n in block.read if n > 0)} on"
        with own_draws():
            try:
                return self._read(request, block)
            except Exception as error:
                self._open.clear()  # what raised has ended
                return Reading(fault=Fault.of(what, error))

    def _read(self, request: Request, block: StreamBlock) -> Reading:
        counts, items, states = [], list[list[Any]](), []
        own: list[Any] = []
        short = False
        for index, (first, last) in enumerate(bounds(request.size, len(block.read))):
            found: list[Any] = []
            state = None
            if block.read[index] == ENDED:
                counts.append(0)
                short = True
            elif any(max(start, first) < min(stop, last) for start, stop in request.rows):
                place = (*request.place, index)
                substream = self._substream(block, index, place)
                draw_from(*place, block.read[index])
                found = substream.read(last - first)
                counts.append(len(found))
                state = substream.state()
                short |= len(found) < last - first
                for start, stop in request.rows:
                    own += found[max(start - first, 0) : max(stop - first, 0)]
            else:
                counts.append(-1)
            items.append(found)
            states.append(state)
        self._sample = next((x[:1] for x in items if x), self._sample)
        draw_from(*request.place, *block.read, request.rows[0][0])  # in `collate`
        numbers = {"counts": tuple(counts), "states": tuple(states), "digest": digest(items)}
        if short:
            return Reading(items=(*items, self._one(block)), **numbers)  # type: ignore[arg-type]
        own = own or self._one(block)
        return Reading(self.collate(own) if own else None, len(own), **numbers)  # type: ignore[arg-type]

    def _substream(self, block: StreamBlock, index: int, place: tuple[int, ...]) -> Substream:
        key = (block.workers, len(block.read), block.worker, index)
        there = self._open.get(key)
        if there is None or not there.goes_on(block.epoch, block.read[index]):
            draw_from(*place, 0)  # as when it began: it may have been shuffled then
            there = self._open[key] = Substream(self.dataset, block, index)
        return there

    def _one(self, block: StreamBlock) -> list[Any]:
        """One item; none where the stream has none."""
        if not self._sample:
            start = StreamBlock(block.epoch, 0, 1, (0,), ())
            self._sample = Substream(self.dataset, start, 0).read(1)
        return self._sample


def digest(items: Sequence[list[Any]]) -> int:
    """A number by which ranks compare the first item that they read; 0 for none."""
    first = next((x[0] for x in items if x), None)
    total = checksum(first)
    for leaf in pytree.tree_leaves(first):
        if isinstance(leaf, bool | int | float | str | bytes):
            total = zlib.crc32(repr(leaf).encode(), total)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf":
            total = zlib.crc32(np.ascontiguousarray(leaf.reshape(-1)[:1024]).tobytes(), total)
    return total
