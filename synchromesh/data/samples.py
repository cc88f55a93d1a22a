"""Samples by index: a map-style data set in a given order, read a global batch at a time."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from synchromesh.data.cursor import Cursor, preserved_generators, seed_generators
from synchromesh.data.reading import Collate, OwnRows, Reading, ReadingFault, Request
from synchromesh.engine.batches import count_of


class SampleReader(Dataset[Reading]):
    """Reads the samples of requests; an error names the sample."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, request: Request) -> Reading:
        with preserved_generators():
            seed_generators(*request.place)
            samples, fault = self._samples(request.what)
            if fault is not None:
                return Reading(fault=fault)
            return Reading(self.collate(samples), len(samples))

    def _samples(self, indices: Sequence[int]) -> tuple[list[Any], ReadingFault | None]:
        """All at once where the data set can do that, as Hugging Face's do."""
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return self._one_by_one(indices)
        try:
            samples = list(together(list(indices)))
            if len(samples) != len(indices):
                raise ValueError(f"it gave {len(samples)} samples")
            return samples, None
        except Exception as error:
            _, fault = self._one_by_one(indices)  # which tells the one at fault
            many = f"{len(indices)} samples of the data set at once (__getitems__)"
            return [], fault or ReadingFault.of(many, error)

    def _one_by_one(self, indices: Sequence[int]) -> tuple[list[Any], ReadingFault | None]:
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                return [], ReadingFault.of(f"sample {index} of the data set", error)
        return samples, None


class SampleSource:
    """The batches of an epoch from a cursor on; `cursor` stands behind what was taken."""

    def __init__(self, batches: Sequence[list[int]], cursor: Cursor, own_rows: OwnRows) -> None:
        self.cursor, self._own_rows = cursor, own_rows
        self._batches, self._done = batches, 0

    @property
    def ended(self) -> bool:
        return self._done == len(self._batches)

    def requests(self) -> Iterator[Request]:
        """Of the batches that are left; this rank's rows are asked for one by one."""
        cursor = self.cursor
        for indices in self._batches[self._done :]:
            rows = self._own_rows(len(indices))
            own = [i for start, stop in rows for i in indices[start:stop]]
            yield Request(
                rows, len(indices),
                own or indices[:1],  # one shows the shape where there is no row
                (cursor.seed, cursor.epoch, cursor.position + rows[0][0]),
            )  # fmt: skip
            cursor = cursor.after(len(indices))

    def take(self, request: Request, reading: Reading) -> tuple[Any, int]:
        """This rank's batch, and the rows of the global batch."""
        batch = reading.rows(count_of(request.rows))
        self.cursor, self._done = self.cursor.after(request.size), self._done + 1
        return batch, request.size


def sample_count(dataset: Any) -> int:
    """The samples of a map-style data set. ValueError where there are none, or no indices."""
    if isinstance(dataset, Mapping):
        names = ", ".join(map(str, list(dataset)[:4]))
        raise ValueError(
            f"the data set is a mapping ({names}): samples are read by index, 0 to len - 1; give "
            "one of its splits"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"the data set ({type(dataset).__name__}) should have __len__ and __getitem__, whose "
            "samples are read by index, or be iterable, a stream"
        )
    length = len(dataset)
    if not length:
        raise ValueError("the data set is empty: there is nothing to train on")
    return length
