"""A loader: this rank's rows of each global batch, from a cursor on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from synchromesh.data.cursor import Cursor, StreamPlace
from synchromesh.data.fetch import CPU, Fetch, Loading
from synchromesh.data.padding import Padding
from synchromesh.data.reading import Collate, OwnRows, Ranges
from synchromesh.data.samples import SampleReader, SampleSource, sample_count
from synchromesh.data.stream import Agree, StreamReader, StreamSource, division
from synchromesh.data.torch_loader import drawn, same_order
from synchromesh.engine.batches import fingerprint
from synchromesh.workloads.workload import is_stream, read_once


@dataclass(frozen=True)
class Batching:
    """How samples become global batches.

    10 samples, batches of 3, continuing:   0 3 6 | 1 4 7 | 2 5 8   the rest, 9, is left out"""

    shuffle: bool = True
    drop_last: bool = False  # a last batch that is not full is left out
    collate: Collate | None = None  # (list of samples) -> batch; None: torch's default
    continuing: bool = False  # row i of a batch is the sample behind row i of the one before it,
    # as the parts of a text: as many streams are read as a batch has rows
    sampler: Any = None  # an epoch's indices, where that is neither all in order nor a permutation
    padding: Padding | None = None  # where rows have different lengths

    @property
    def whole(self) -> bool:
        return self.drop_last or self.continuing

    def reads_as(self, other: "Batching") -> bool:
        """Whether a loader of the one is that of the other, asked for again."""
        alike = _code(self.collate) == _code(other.collate) and self.shuffle == other.shuffle
        return alike and same_order(self.sampler, other.sampler)


class Loader:
    """Iterates over the rest of the cursor's epoch, then moves the cursor to the next one. While a
    batch is being used, `cursor` already stands behind it, and `rows` are those of the global
    batch: a checkpoint written after the batch's step resumes with the next. A rank without rows
    in a batch gets tensors of 0 rows. The last batch of an epoch is short where the batch size
    does not divide the samples, or left out (`Batching.whole`)."""

    def __init__(
        self, dataset: Any, batch_size: int, rows_of: OwnRows, cursor: Cursor | None = None,
        batching: Batching | None = None, loading: Loading | None = None,
        agree: Agree = lambda value: [value], device: torch.device = CPU,
    ) -> None:  # fmt: skip
        """dataset: samples by index, or a stream (`data/stream.py`), of which all ranks iterate
        alike. batch_size: rows over all ranks. agree: gathers a value of each rank. ValueError for
        a data set that is empty, can be read only once, or (where batches are shuffled or short
        ones dropped) is smaller than one batch; for a stream that is to be shuffled, or shuffled
        samples that are to follow each other."""
        self.dataset, self.batch_size, self.rows_of = dataset, batch_size, rows_of
        self.cursor, self.batching = cursor or Cursor(), batching or Batching()
        self.loading, self.agree = loading or Loading(), agree
        self.rows, self.chosen = 0, False  # chosen: the batch size changes while training
        # called with each batch, and with what reads it again with the rows of then (`again`)
        self.handed_out: Callable[[Loader, Any, Callable[[], Any]], object] = lambda *_: None
        self._agreed = False  # a batch is read again, on whose order ranks have agreed
        self.ended: Callable[[], object] = lambda: None  # at an epoch's end
        self.stream = is_stream(dataset)
        shuffle = self.batching.shuffle
        self.samples = _stream_length(dataset, shuffle) if self.stream else sample_count(dataset)
        if self.batching.sampler is not None:
            self.samples = len(self.batching.sampler)
        self._check()
        self.collate = self.batching.collate or default_collate
        reader = (StreamReader if self.stream else SampleReader)(dataset, self.collate)
        self._fetch = Fetch(reader, dataset, self.loading, device)

    def _check(self) -> None:
        size, batching = self.batch_size, self.batching
        if size < 1:
            raise ValueError(f"the batch size should be at least 1, not {size}")
        if batching.continuing and (batching.shuffle or self.stream):
            raise ValueError(
                "continuing=True reads samples by index, each behind the one before it: give a "
                f"map-style data set, not {'shuffled' if batching.shuffle else 'a stream'}"
            )
        entire = batching.shuffle or batching.whole
        if entire and self.samples is not None and size > self.samples:
            raise ValueError(
                f"the batch size ({size}) is larger than the data set "
                f"({self.samples} samples): choose a smaller batch"
            )

    def __len__(self) -> int:
        """Global batches left in this epoch. TypeError for a stream that does not say that."""
        if self.samples is None:
            raise TypeError(
                f"the data set ({type(self.dataset).__name__}) is a stream without a length: how "
                "many batches are left shows at its end"
            )
        return self._batches(max(0, self.samples - self.cursor.position))

    @property
    def batches(self) -> int | None:
        """Of an entire epoch; None: not known. Substreams that end apart may exceed a stream's."""
        return None if self.samples is None else self._batches(self.samples)

    @property
    def done(self) -> int:
        """Global batches of this epoch that were handed out, at the present batch size."""
        if self.batches is None:
            return -(-self.cursor.position // self.batch_size)
        return self.batches - len(self)

    @property
    def last(self) -> bool:
        """Whether the epoch is known to end behind this batch; of a stream it never is."""
        return not self.stream and not len(self)

    @property
    def said(self) -> Cursor:
        """The cursor as a checkpoint has it."""
        size = self.batch_size if self.chosen else None
        return replace(self.cursor, samples=self.samples, batch_size=size)

    @property
    def place(self) -> str:
        """Where in its data it is; the same on all ranks."""
        c = self.cursor
        data = "a stream" if self.stream else f"{self.samples} samples"
        order = f"shuffled by seed {c.seed}" if self.batching.shuffle else "in their order"
        order = "each row a stream" if self.batching.continuing else order
        if self.batching.sampler is not None:
            order = f"as a {type(self.batching.sampler).__name__} draws them by seed {c.seed}"
        return (
            f"{data}, {order}, in batches of {self.batch_size}, at row {c.position} of epoch "
            f"{c.epoch + 1}"
        )

    def _batches(self, samples: int) -> int:
        size = self.batch_size
        return samples // size if self.batching.whole else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        start = self.cursor
        source, size = self._source(), self.batch_size
        while not source.ended:
            for request, reading in self._fetch.readings(
                source.requests(), self._workers(source), self._drawn_from(source.cursor)
            ):
                if self._resized(size) or request.rows != self._own_rows(request.size):
                    break  # either has changed since it was read: again from here on
                begins, taken = source.cursor, source.take(request, reading)
                if taken is not None:
                    batch, self.rows = taken
                    batch = self._padded(batch)
                    self.cursor = source.cursor
                    self.handed_out(self, batch, partial(self.again, begins, size))
                    yield batch
                if source.ended:
                    break
            if self._resized(size) and not (self.stream and source.ended):
                source, size = self._source(), self.batch_size
        self._refuse_empty_epoch(start)
        self.cursor = Cursor(self.cursor.seed, self.cursor.epoch + 1)
        self.ended()

    def again(self, begins: Cursor, size: int) -> Any:
        """The batch of so many rows that begins there, with this rank's rows as they are now."""
        before = self.cursor, self.batch_size
        self.cursor, self.batch_size, self._agreed = begins, size, True
        try:
            return next(iter(self))
        finally:
            (self.cursor, self.batch_size), self._agreed = before, False

    def _padded(self, batch: Any) -> Any:
        padding = self.batching.padding
        return batch if padding is None else padding.padded(batch, self.agree)

    def _refuse_empty_epoch(self, start: Cursor) -> None:
        """start: where it began."""
        if self.stream and start.position == 0 and self.cursor == start:
            raise ValueError(
                f"the stream ({type(self.dataset).__name__}) gave "
                f"{'less than one batch' if self.batching.whole else 'nothing'} in epoch "
                f"{start.epoch + 1}: each iter() of it should begin anew"
            )

    def _resized(self, size: int) -> bool:
        """Whether batches have other rows from now on; what is set by hand waits for the epoch."""
        return self.chosen and self.batch_size != size

    def _source(self) -> StreamSource | SampleSource:
        """From the cursor on, in batches of the present size."""
        return self._stream_source() if self.stream else self._sample_source()

    def _sample_source(self) -> SampleSource:
        assert self.samples is not None
        if self.batching.continuing:
            steps = self.samples // self.batch_size
            order = torch.arange(steps * self.batch_size).view(-1, steps).t().flatten()
        elif self.batching.sampler is not None:
            order = self._sampled()
        else:
            order = self.cursor.order(self.samples, self.batching.shuffle)
        batches = [
            order[start : start + self.batch_size].tolist()
            for start in range(self.cursor.position, self.samples, self.batch_size)
        ]
        return SampleSource(batches[: len(self)], self.cursor, self._own_rows)

    def _sampled(self) -> Tensor:
        """The order of the sampler. ValueError where ranks have different ones."""
        order = drawn(self.batching.sampler, self.cursor)
        kind = type(self.batching.sampler).__name__
        if not self._agreed and len({*self.agree(fingerprint(tuple(order)))}) > 1:
            raise ValueError(
                f"the sampler ({kind}) gives ranks different orders: draw from its own generator, "
                "or from torch's, numpy's or Python's, which are seeded alike for each epoch"
            )
        if len(order) != self.samples:
            raise ValueError(f"the sampler ({kind}) has len {self.samples}, and gave {len(order)}")
        return torch.tensor(order)

    def _stream_source(self) -> StreamSource:
        wanted = max(1, self.loading.num_workers)
        place = self.cursor.stream
        if place is None:
            parts = self.agree(self._own_rows(self.batch_size))
            place = StreamPlace.start(*division(self.dataset, wanted, _divided(parts)))
        elif place.shape[0] != wanted and not hasattr(self.dataset, "shard"):
            raise ValueError(
                f"the stream divides itself between workers and was read by {place.shape[0]} in "
                f"this epoch: go on with num_workers={place.shape[0]}, not "
                f"{self.loading.num_workers}, or begin the next epoch with that"
            )
        return StreamSource(
            place, self.cursor, self.batch_size, self._own_rows, self.agree, self.collate,
            self.batching.whole,
        )  # fmt: skip

    def _workers(self, source: SampleSource | StreamSource) -> int:
        """Processes that read: of a stream as many as it is divided for."""
        if isinstance(source, StreamSource) and self.loading.num_workers:
            return source.workers
        return self.loading.num_workers

    def _drawn_from(self, cursor: Cursor) -> int:
        """The seed of what worker processes draw: ranks that read the same draw the same."""
        common = cursor.stream is not None and cursor.stream.shape[1] == 1
        first = 0 if common else self._own_rows(self.batch_size)[0][0]
        return Cursor.mixed(cursor.seed, cursor.epoch, cursor.position, first)

    def _own_rows(self, count: int) -> Ranges:
        ranges = self.rows_of(count)
        assert all(0 <= a <= b <= count for a, b in ranges), f"rows {ranges} of {count}"
        return ranges


def _code(function: Any) -> Any:
    """Equal for a function that is defined anew, as a lambda in a loop is."""
    return getattr(function, "__code__", function)


def _divided(parts: Sequence[Sequence[Sequence[int]]]) -> int:
    """How many ranks have blocks of rows apart, of the parts of all; 1 where parts mingle."""
    blocks = sorted({(start, stop) for rank in parts for start, stop in rank if start < stop})
    apart = all(a[1] <= b[0] for a, b in pairwise(blocks)) and all(len(p) == 1 for p in parts)
    return len(blocks) if apart else 1


def _stream_length(dataset: Any, shuffle: bool) -> int | None:
    """The items of a stream, None where it does not say. ValueError for one that cannot be read
    epoch after epoch, or not in the order that is asked for."""
    if read_once(dataset):
        raise ValueError(
            f"the data set ({type(dataset).__name__}) can be read only once: give an object "
            "whose __iter__ begins anew, as torch.utils.data.IterableDataset"
        )
    if shuffle:
        raise ValueError(
            "a stream is read in its own order: leave shuffle=True out, and shuffle it where it "
            "is made (as .shuffle(seed=..., buffer_size=...) of Hugging Face's does)"
        )
    try:
        return len(dataset)
    except TypeError:
        return None
