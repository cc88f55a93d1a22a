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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset
from torch.utils.data._utils import worker as torch_worker

from synchromesh.checkpoint import json_state
from synchromesh.data.cursor import Cursor, StreamPlace, preserved_generators, seed_generators
from synchromesh.data.reading import (
    Collate,
    OwnRows,
    Reading,
    ReadingFault,
    Request,
    SampleError,
)
from synchromesh.engine.batches import checksum, count_of
from synchromesh.values.caution import caution

Agree = Callable[[Any], list[Any]]  # a value of this rank -> those of all, as JSON has them


@dataclass(frozen=True)
class StreamBlock:
    """What a request to a stream is about: the next items of the substreams of one worker."""

    ENDED: ClassVar[int] = -1  # in place of a number of items: this substream has no more
    epoch: int
    worker: int
    workers: int
    read: tuple[int, ...]  # items that each substream has given before, or ENDED
    states: tuple[Any, ...]  # of the data set there, where it has one


def bounds(size: int, blocks: int) -> list[tuple[int, int]]:
    """Rows [start, stop) of a global batch that each block gives."""
    return [(i * size // blocks, (i + 1) * size // blocks) for i in range(blocks)]


def division(dataset: Any, workers: int, ranks: int) -> tuple[int, int]:
    """The (workers, blocks) of a stream for `ranks` that read different rows: a data set that
    shards itself may have fewer, as each substream has equally many of its shards."""
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
            _restore(part, state)
            self._items = iter(part)
            items: Any = self._items
            self._stateful = next((x for x in (items, part) if _stateful(x)), None)
            _restore(items, state)
            if state is None or self._stateful is None:
                self._skip(self.position)

    def _skip(self, count: int) -> None:
        skipped = sum(1 for _ in islice(self._items, count))
        if skipped < count:
            raise ValueError(
                f"the stream ends after {skipped} items, of which {count} were read before: it is "
                "not the stream that it was"
            )

    def goes_on(self, epoch: int, position: int) -> bool:
        """Whether the items from `position` on are next; behind its end there are none."""
        ended = self._over and position >= self.position
        return self.epoch == epoch and (ended or position == self.position)

    def read(self, count: int) -> list[Any]:
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
        """A data set that has sharded itself and saw a worker would shard itself once more."""
        before = torch_worker._worker_info
        if self._sharded:
            torch_worker._worker_info = None
        try:
            yield
        finally:
            torch_worker._worker_info = before


def _stateful(x: Any) -> bool:
    return hasattr(x, "state_dict") and hasattr(x, "load_state_dict")


def _restore(x: Any, state: Any) -> None:
    if state is not None and _stateful(x):
        x.load_state_dict(state)


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
        with preserved_generators():
            try:
                return self._read(request, block)
            except Exception as error:
                self._open.clear()  # what raised has ended
                return Reading(fault=ReadingFault.of(what, error))

    def _read(self, request: Request, block: StreamBlock) -> Reading:
        counts, states, items = [], [], list[list[Any]]()
        own: list[Any] = []
        edges = bounds(request.size, len(block.read))
        for index, (first, _) in enumerate(edges):
            count, given, state = self._given(request, block, index)
            for start, stop in request.rows:
                own += given[max(start - first, 0) : max(stop - first, 0)]
            counts.append(count)
            items.append(given)
            states.append(state)
        self._sample = next((x[:1] for x in items if x), self._sample)
        seed_generators(*request.place, *block.read, request.rows[0][0])  # in `collate`
        numbers = {"counts": tuple(counts), "states": tuple(states), "digest": digest(items)}
        if any(0 <= n < last - first for n, (first, last) in zip(counts, edges, strict=True)):
            return Reading(items=(*items, self._one(block)), **numbers)  # type: ignore[arg-type]
        own = own or self._one(block)
        return Reading(self.collate(own) if own else None, len(own), **numbers)  # type: ignore[arg-type]

    def _given(
        self, request: Request, block: StreamBlock, index: int
    ) -> tuple[int, list[Any], Any]:
        """Number of items (-1: no row of it is asked for), these, and the state behind them."""
        first, last = bounds(request.size, len(block.read))[index]
        if block.read[index] == StreamBlock.ENDED:
            return 0, [], None
        if not any(max(start, first) < min(stop, last) for start, stop in request.rows):
            return -1, [], None
        place = (*request.place, index)
        substream = self._substream(block, index, place)
        seed_generators(*place, block.read[index])
        items = substream.read(last - first)
        return len(items), items, substream.state()

    def _substream(self, block: StreamBlock, index: int, place: tuple[int, ...]) -> Substream:
        key = (block.workers, len(block.read), block.worker, index)
        there = self._open.get(key)
        if there is None or not there.goes_on(block.epoch, block.read[index]):
            seed_generators(*place, 0)  # as when it began: it may have been shuffled then
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


class StreamSource:
    """The batches of a stream from a cursor on, which stands behind what was taken. Ranks tell
    each other with each batch what substreams gave. All ranks take alike."""

    def __init__(
        self, place: StreamPlace, cursor: Cursor, size: int, own_rows: OwnRows,
        agree: Agree, collate: Collate, drop_last: bool,
    ) -> None:  # fmt: skip
        """size: rows of a global batch."""
        self.cursor, self.size, self.drop_last = cursor, size, drop_last
        self.workers, self.blocks = place.shape
        self._own_rows, self._agree, self._collate = own_rows, agree, collate
        self._read = [list(row) for row in place.read]
        self._states = [list(row) for row in place.states]
        self._over = [[False] * self.blocks for _ in range(self.workers)]
        self._worker = place.worker
        self._compared = False
        if self.blocks > size:
            raise ValueError(
                f"the batch size ({size}) is smaller than the number of parts that the stream is "
                f"divided into ({self.blocks}) in this epoch: choose a larger one"
            )

    @property
    def ended(self) -> bool:
        return all(over for row in self._over for over in row)

    def requests(self) -> Iterator[Request]:
        """Of all batches to come, without an end; this rank's rows are asked for one by one. First
        come as many that ask nothing as bring the turn to the right worker."""
        read, states = [[*row] for row in self._read], [[*row] for row in self._states]
        over = [[*row] for row in self._over]
        sizes = [stop - start for start, stop in bounds(self.size, self.blocks)]
        for _ in range(self._worker):
            yield Request(((0, 0),), 0, None)
        worker = self._worker
        while True:
            places = zip(read[worker], over[worker], strict=True)
            start = tuple(StreamBlock.ENDED if end else n for n, end in places)
            epoch, known = self.cursor.epoch, tuple(states[worker])
            block = StreamBlock(epoch, worker, self.workers, start, known)
            place = (self.cursor.seed, self.cursor.epoch, worker)
            yield Request(self._own_rows(self.size), self.size, block, place)
            read[worker] = [n + size for n, size in zip(read[worker], sizes, strict=True)]
            states[worker] = []  # only where it begins; behind that substreams are open
            worker = (worker + 1) % self.workers

    def take(self, request: Request, reading: Reading) -> tuple[Any, int] | None:
        """This rank's batch and the global batch's rows, or None. On all ranks alike SampleError
        where one could not read, ValueError where they have read different streams."""
        if request.what is None:
            return None
        worker, self._worker = request.what.worker, (request.what.worker + 1) % self.workers
        if all(self._over[worker]):
            return None
        counts = self._counts(reading)
        sizes = [stop - start for start, stop in bounds(self.size, self.blocks)]
        for i, count in enumerate(counts):
            self._read[worker][i] += count
            self._over[worker][i] |= count < sizes[i]
            if reading.counts[i] > 0:
                self._states[worker][i] = reading.states[i]
            elif count:
                self._states[worker][i] = None  # of a rank that has read it
        total = sum(counts)
        if not total or (self.drop_last and total < self.size):
            return None
        rows, reading = self._rows(request, reading, counts)
        batch = reading.rows(rows)
        read, states = (tuple(map(tuple, table)) for table in (self._read, self._states))
        self.cursor = self.cursor.after(total, StreamPlace(read, self._worker, states))
        return batch, total

    def _counts(self, reading: Reading) -> list[int]:
        """What each substream of the turn gave, as all ranks know it."""
        fault = None if reading.fault is None else reading.fault.sentence
        table = self._agree([fault, reading.counts, reading.digest])
        if fault is not None and reading.fault is not None:
            raise reading.fault.error()
        for rank, (other, _, _) in enumerate(table):
            if other is not None:
                raise SampleError(f"rank {rank}: {other}")
        counts = [self._count([row[1][index] for row in table]) for index in range(self.blocks)]
        self._compare({row[2] for row in table if any(n > 0 for n in row[1])})
        return counts

    @staticmethod
    def _count(by_rank: list[int]) -> int:
        """What the ranks that read a substream have got of it; below 0: a rank that did not."""
        given = {rank: n for rank, n in enumerate(by_rank) if n >= 0}
        if len(set(given.values())) > 1:
            raise ValueError(
                "ranks have read different streams: "
                + ", ".join(f"rank {rank} got {n} items" for rank, n in given.items())
                + " where the next batch is; a stream must be the same on every rank: not "
                "divided by rank, and shuffled by a common seed"
            )
        return next(iter(given.values()), 0)

    def _compare(self, digests: set[int]) -> None:
        """Warns where ranks that read one stream begin with different items."""
        if self.blocks == 1 and not self._compared and len(digests) > 1:
            caution(
                "ranks read different items at the same place of the stream, of which each keeps "
                "its own rows alone: a stream that is divided by rank loses what the others have, "
                "one that is shuffled needs a common seed (only where items are changed at "
                "random, nothing is lost)"
            )
        self._compared = True

    def _rows(self, request: Request, reading: Reading, counts: list[int]) -> tuple[int, Reading]:
        """The rows that this rank has of a batch, and its reading, collated."""
        if sum(counts) == self.size or not reading.items:  # what it reads is full, or it has none
            return count_of(request.rows), reading
        *items, sample = reading.items
        own = self._own_items(request, items, counts)
        shown = own or sample
        with preserved_generators():
            seed_generators(*request.place, *request.what.read, request.rows[0][0])
            return len(own), Reading(self._collate(shown), len(shown))

    def _own_items(
        self, request: Request, items: Sequence[Sequence[Any]], counts: Sequence[int]
    ) -> list[Any]:
        """This rank's of the items that each substream gave for a batch that is not full."""
        if self.blocks == 1:  # every rank has all of them
            return [x for a, b in self._own_rows(counts[0]) for x in items[0][a:b]]
        edges = (first for first, _ in bounds(self.size, self.blocks))
        blocks = zip(edges, items, strict=True)
        placed = (x for edge, part in blocks for x in enumerate(part, edge))
        return [x for row, x in placed if any(a <= row < b for a, b in request.rows)]
