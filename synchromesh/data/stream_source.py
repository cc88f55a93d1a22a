"""The batches of an epoch of a stream, on which all ranks agree: no rank ends before another."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from synchromesh.data.cursor import Cursor, StreamPlace
from synchromesh.data.draws import draw_from, own_draws
from synchromesh.data.reading import Collate, OwnRows, Reading, Request, SampleError, within
from synchromesh.data.stream import ENDED, StreamBlock, bounds
from synchromesh.engine.batches import count_of

Agree = Callable[[Any], list[Any]]  # a value of this rank -> those of all, as JSON has them


class StreamSource:
    """The batches of a stream from a cursor on; `cursor` stands behind what was taken.

    What substreams give is not known before they are read, so ranks tell each other with each
    batch. All ranks take alike."""

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
        """Whether all substreams have ended."""
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
            start = tuple(ENDED if end else n for n, end in places)
            block = StreamBlock(
                self.cursor.epoch, worker, self.workers, start, tuple(states[worker])
            )
            place = (self.cursor.seed, self.cursor.epoch, worker)
            yield Request(self._own_rows(self.size), self.size, block, place)
            read[worker] = [n + size for n, size in zip(read[worker], sizes, strict=True)]
            states[worker] = []  # only where it begins; behind that substreams are open
            worker = (worker + 1) % self.workers

    def take(self, request: Request, reading: Reading) -> tuple[Any, int] | None:
        """This rank's batch, and the rows of the global batch; None where it has none.

        On all ranks alike: SampleError where one could not read, ValueError where they have read
        different streams."""
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
        self.cursor = self.cursor.after(total, self._place())
        return batch, total

    def _place(self) -> StreamPlace:
        read, states = (tuple(map(tuple, table)) for table in (self._read, self._states))
        return StreamPlace(read, self._worker, states)

    def _counts(self, reading: Reading) -> list[int]:
        """What each substream of the turn gave, as all ranks know it."""
        fault = None if reading.fault is None else reading.fault.sentence
        table = self._agree([fault, reading.counts, reading.digest])
        if fault is not None and reading.fault is not None:
            raise reading.fault.error()
        for rank, (other, _, _) in enumerate(table):
            if other is not None:
                raise SampleError(f"rank {rank}: {other}")
        found = []
        for index in range(self.blocks):
            given = {rank: row[1][index] for rank, row in enumerate(table) if row[1][index] >= 0}
            if len(set(given.values())) > 1:
                raise ValueError(
                    "ranks have read different streams: "
                    + ", ".join(f"rank {rank} got {n} items" for rank, n in given.items())
                    + " where the next batch is; a stream must be the same on every rank: not "
                    "divided by rank, and shuffled by a common seed"
                )
            found.append(next(iter(given.values()), 0))
        self._compare({row[2] for row in table if any(n > 0 for n in row[1])})
        return found

    def _compare(self, digests: set[int]) -> None:
        """Warns where ranks that read one stream begin with different items."""
        if self.blocks == 1 and not self._compared and len(digests) > 1:
            warnings.warn(
                "ranks read different items at the same place of the stream, of which each keeps "
                "its own rows alone: a stream that is divided by rank loses what the others have, "
                "one that is shuffled needs a common seed (only where items are changed at "
                "random, nothing is lost)",
                stacklevel=2,
            )
        self._compared = True

    def _rows(self, request: Request, reading: Reading, counts: list[int]) -> tuple[int, Reading]:
        """The rows that this rank has of a batch, and its reading, collated."""
        if sum(counts) == self.size:
            return count_of(request.rows), reading
        if not reading.items:  # what it reads is full, or it has no rows
            return count_of(request.rows), reading
        *items, sample = reading.items
        if self.blocks == 1:  # every rank has all of them
            own = [x for a, b in self._own_rows(counts[0]) for x in items[0][a:b]]
        else:
            edges = [first for first, _ in bounds(self.size, self.blocks)]
            own = [
                item
                for edge, part in zip(edges, items, strict=True)
                for row, item in enumerate(part, edge)
                if within(row, request.rows)
            ]
        shown = own or sample
        with own_draws():
            draw_from(*request.place, *request.what.read, request.rows[0][0])
            return len(own), Reading(self._collate(shown), len(shown))
