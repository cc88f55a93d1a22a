"""A loader: this rank's rows of each global batch, from a cursor on; and all of a trainer."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import default_collate

from synchromesh.data.cursor import Cursor, StreamPlace
from synchromesh.data.fetch import CPU, Fetch, Loading, LoadingOptions
from synchromesh.data.reading import Collate, OwnRows, Ranges
from synchromesh.data.samples import SampleReader, SampleSource, sample_count
from synchromesh.data.stream import Agree, StreamReader, StreamSource, division
from synchromesh.engine.groups import World
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

    @property
    def whole(self) -> bool:
        return self.drop_last or self.continuing


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
        self.rows = 0
        self.handed_out: Callable[[Loader], object] = lambda _: None  # called with each batch
        self.stream = is_stream(dataset)
        shuffle = self.batching.shuffle
        self.samples = _stream_length(dataset, shuffle) if self.stream else sample_count(dataset)
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

    def last(self, done: int) -> bool:
        """Whether the epoch is known to end behind `done` batches; of a stream it never is."""
        return not self.stream and done == self.batches

    @property
    def place(self) -> str:
        """Where in its data it is; the same on all ranks."""
        c = self.cursor
        data = "a stream" if self.stream else f"{self.samples} samples"
        order = f"shuffled by seed {c.seed}" if self.batching.shuffle else "in their order"
        order = "each row a stream" if self.batching.continuing else order
        return (
            f"{data}, {order}, in batches of {self.batch_size}, at row {c.position} of epoch "
            f"{c.epoch + 1}"
        )

    def _batches(self, samples: int) -> int:
        size = self.batch_size
        return samples // size if self.batching.whole else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        start = self.cursor
        source = self._stream_source() if self.stream else self._sample_source()
        while not source.ended:
            for request, reading in self._fetch.readings(
                source.requests(), self._workers(source), self._drawn_from(source.cursor)
            ):
                if request.rows != self._own_rows(request.size):
                    break  # the plan has changed since it was read: again from here on
                taken = source.take(request, reading)
                if taken is not None:
                    batch, self.rows = taken
                    self.cursor = source.cursor
                    self.handed_out(self)
                    yield batch
                if source.ended:
                    break
        self._refuse_empty_epoch(start)
        self.cursor = Cursor(self.cursor.seed, self.cursor.epoch + 1)

    def _refuse_empty_epoch(self, start: Cursor) -> None:
        """start: where it began."""
        if self.stream and start.position == 0 and self.cursor == start:
            raise ValueError(
                f"the stream ({type(self.dataset).__name__}) gave "
                f"{'less than one batch' if self.batching.whole else 'nothing'} in epoch "
                f"{start.epoch + 1}: each iter() of it should begin anew"
            )

    def _sample_source(self) -> SampleSource:
        assert self.samples is not None
        if self.batching.continuing:
            steps = self.samples // self.batch_size
            order = torch.arange(steps * self.batch_size).view(-1, steps).t().flatten()
        else:
            order = self.cursor.order(self.samples, self.batching.shuffle)
        batches = [
            order[start : start + self.batch_size].tolist()
            for start in range(self.cursor.position, self.samples, self.batch_size)
        ]
        return SampleSource(batches[: len(self)], self.cursor, self._own_rows)

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


class Loaders:
    """One for each data set and order of rows, as they were asked for. own_rows(rows): of a global
    batch, this rank's. carries: whether a row goes on in the same row of the next batch."""

    def __init__(self, own_rows: OwnRows, world: World, carries: bool = False) -> None:
        self._own_rows, self._world, self._carries = own_rows, world, carries
        self.place = ""  # of the batch that was handed out last
        self.begins = False  # whether that was the first one of an epoch, until it is trained on
        self._made: dict[Loader, int] = {}  # with the seeds that were asked for
        self._resumed: list[Cursor] = []  # of a checkpoint, for loaders to come

    def one(
        self, dataset: Any, batch_size: int, batching: Batching, seed: int, options: LoadingOptions
    ) -> Loader:
        """The loader that was made before, else a new one. All ranks call alike. ValueError
        where settings or ranks differ, TypeError for an option that there is not."""
        if self._carries and batching.shuffle:
            raise ValueError(
                "a carry goes from row i of a batch to row i of the next, and shuffled samples do "
                "not follow each other: give continuing=True in place of shuffle=True"
            )
        batching, loading = _loading_of(batching, options)
        asked = _settings(batch_size, batching, seed, loading)
        for loader, its_seed in self._made.items():
            if loader.dataset is dataset and loader.batching.shuffle == batching.shuffle:
                _refuse_other(loader, its_seed, asked)
                return loader
        loader = Loader(
            dataset, batch_size, self._own_rows, Cursor(seed), batching, loading,
            self._world.everyone.all_gather_json, self._world.device,
        )  # fmt: skip
        if self._resumed:
            self._go_on(loader, self._resumed.pop(0))
        loader.handed_out = self._note
        self._made[loader] = seed
        return loader

    def _note(self, loader: Loader) -> None:
        self.place, self.begins = loader.place, loader.cursor.position == loader.rows

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """Inside, one of these loaders begins its epoch anew; then it goes on where it was."""
        begins, own = self.begins, isinstance(loader, Loader)
        cursor = loader.cursor if own else None
        if own:
            loader.cursor = replace(loader.cursor, position=0, stream=None)
        try:
            yield
        finally:
            self.begins = begins
            if own:
                loader.cursor = cursor

    def places(self) -> tuple[Cursor, ...]:
        """Every loader's place, as a checkpoint keeps it; all ranks call alike."""
        places = [replace(x.cursor, samples=x.samples).to_dict() for x in self._made]
        if any("stream" in place for place in places):
            # a rank has the states of those substreams alone that it reads
            of_ranks = self._world.everyone.all_gather_json(places)
            for index, place in enumerate(places):
                if "stream" in place:
                    tables = [rank[index]["stream"]["states"] for rank in of_ranks]
                    place["stream"]["states"] = _known_states(tables)
        return tuple(map(Cursor.from_dict, places))

    def go_on(self, places: Iterable[Cursor]) -> None:
        """Loaders go on from the places of a checkpoint; those to come take what is left."""
        self._resumed, self.begins = list(places), False
        for loader in self._made:
            if self._resumed:
                self._go_on(loader, self._resumed.pop(0))

    def _go_on(self, loader: Loader, place: Cursor) -> None:
        """The loader goes on at `place`; a warning where that was one in other data."""
        loader.cursor = replace(place, samples=None)
        if place.position and place.samples != loader.samples and not self._world.rank:
            warnings.warn(
                f"the run was saved behind sample {place.position} of a data set of "
                f"{place.samples}, this one has {loader.samples}: it has another order, so in the "
                f"rest of epoch {place.epoch + 1} samples may come twice or not at all (loaders "
                "are told apart by the order in which they are asked for)",
                stacklevel=2,
            )


def _loading_of(batching: Batching, options: LoadingOptions) -> tuple[Batching, Loading]:
    """`options` without what torch calls `collate`, which is of the batching."""
    given = dict(options)
    collate: Any = given.pop("collate_fn", None)
    if batching.collate is not None and collate is not None:
        raise ValueError("collate and collate_fn are the same: give one of them")
    return replace(batching, collate=batching.collate or collate), Loading.of(given)


def _settings(batch_size: int, batching: Batching, seed: int, loading: Loading) -> dict[str, Any]:
    """What a second call for a data set may not change, by the names of arguments."""
    own = {"batch_size": batch_size, "drop_last": batching.whole, "seed": seed}
    return {**own, "continuing": batching.continuing, **vars(loading)}


def _refuse_other(loader: Loader, seed: int, asked: Mapping[str, Any]) -> None:
    """ValueError where the loader was made with other settings than are asked for."""
    there = _settings(loader.batch_size, loader.batching, seed, loader.loading)
    if odd := [f"{k}={asked[k]} (was {there[k]})" for k in asked if asked[k] != there[k]]:
        raise ValueError(
            f"this data set has a loader already, with other settings: {', '.join(odd)}; set "
            "loader.batch_size on it, or wrap the data set for a second order"
        )


def _known_states(tables: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Of each substream the state that one of the ranks has; None where none has it."""
    return [
        [next((c for c in cells if c is not None), None) for cells in zip(*rows, strict=True)]
        for rows in zip(*tables, strict=True)
    ]
