"""A cursor: where a run is in the order of its samples; a loader reads this rank's rows.

The order of an epoch follows from the seed, the epoch and the number of samples alone. Global
batch k is entries [k B, (k + 1) B) of it, whatever the plan and however many ranks there are;
which of its rows are this rank's is asked anew for every batch, so that a switch may come in the
middle of an epoch:

    order          7 2 9 0 | 4 1 8 3 | 6 5        10 samples, global batch 4
    rank 0 of 2    7 2       4 1       6
    rank 1 of 2        9 0       8 3     5
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from traceback import format_exception
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from synchromesh.values import document

RowsOf = Callable[[int], tuple[int, int]]  # rows of a global batch -> this rank's [start, stop)
Collate = Callable[[list[Any]], Any]


class SampleError(ValueError):
    """A sample that cannot be read; the message has its index and the cause."""


@dataclass(frozen=True)
class Cursor:
    """The next sample to hand out: entry `position` of the order of `epoch`."""

    seed: int = 0
    epoch: int = 0
    position: int = 0

    def order(self, samples: int, shuffle: bool = True) -> Tensor:
        """The indices of an epoch's samples in order, int64; the same on every rank."""
        if not shuffle:
            return torch.arange(samples)
        # The CPU generator uses the low 32 bits of its seed only: both are mixed into them.
        mixed = blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=4).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(mixed, "little"))
        return torch.randperm(samples, generator=generator)

    def after(self, rows: int) -> "Cursor":
        """The cursor behind `rows` more samples."""
        return replace(self, position=self.position + rows)

    def next_epoch(self) -> "Cursor":
        """The start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)

    def to_dict(self) -> dict[str, int]:
        """As checkpoints keep it."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    @classmethod
    def from_dict(cls, value: Any, name: str = "cursor") -> "Cursor":
        """The inverse of `to_dict`. ValueError for anything else; `name` is what it calls it."""
        keys = ("seed", "epoch", "position")
        item = document.mapping(value, name, keys, keys)
        least = {"seed": -(2**63), "epoch": 0, "position": 0}
        return cls(**{k: document.integer(item[k], f"{name}: {k}", least[k], 2**63) for k in keys})


class Loader:
    """Iterates over the rest of the cursor's epoch, then moves the cursor to the next one.

    While a batch is being used, `cursor` already stands behind it: a checkpoint written after the
    batch's step resumes with the next. A rank without rows in a batch gets tensors of 0 rows.
    The last batch of an epoch is short where the batch size does not divide the samples, or left
    out with `drop_last`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        rows_of: RowsOf,
        cursor: Cursor | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        collate: Collate | None = None,
        num_workers: int = 0,
        timeout: float = 0.0,
    ) -> None:
        """batch_size: rows over all ranks. timeout: seconds to wait for a worker, 0 for ever.

        ValueError for a data set that is empty, has no length, or (where batches are shuffled or
        short ones dropped) is smaller than one batch.
        """
        self.dataset, self.batch_size, self.rows_of = dataset, batch_size, rows_of
        self.cursor = cursor or Cursor()
        self.shuffle, self.drop_last = shuffle, drop_last
        self.collate: Collate = collate or default_collate
        self.num_workers, self.timeout = num_workers, timeout
        self.samples = _length(dataset)
        if batch_size < 1:
            raise ValueError(f"the batch size should be at least 1, not {batch_size}")
        if batch_size > self.samples and (shuffle or drop_last):
            raise ValueError(
                f"the batch size ({batch_size}) is larger than the data set "
                f"({self.samples} samples): choose a smaller batch"
            )
        if num_workers < 0 or timeout < 0:
            raise ValueError(
                f"num_workers ({num_workers}) and timeout ({timeout}) should not be negative"
            )

    def __len__(self) -> int:
        """Global batches left in this epoch."""
        left = max(0, self.samples - self.cursor.position)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = self.cursor.order(self.samples, self.shuffle)
        batches = [
            order[start : start + self.batch_size].tolist()
            for start in range(self.cursor.position, self.samples, self.batch_size)
        ]
        batches = batches[: len(self)]
        read = self._workers(batches) if self.num_workers else self._here(batches)
        for batch, rows in read:
            self.cursor = self.cursor.after(rows)
            yield batch
        self.cursor = self.cursor.next_epoch()

    def _here(self, batches: Sequence[list[int]]) -> Iterator[tuple[Any, int]]:
        named, join = _Named(self.dataset), _Join(self.collate)
        for indices in batches:
            start, stop = self._rows(len(indices))
            samples = [named[i] for i in indices[start:stop] or indices[:1]]
            yield self._checked(join(samples), stop - start, len(samples)), len(indices)

    def _workers(self, batches: Sequence[list[int]]) -> Iterator[tuple[Any, int]]:
        """As `_here`, prefetched by worker processes.

        Workers run ahead with the rows of the plan as it was; where the plan has changed since,
        what they prefetched is thrown away and they begin again at the current batch.
        """
        done = 0
        while done < len(batches):
            asked: deque[tuple[int, int]] = deque()
            for batch in self._prefetched(batches[done:], asked):
                start, stop = asked.popleft()
                if (start, stop) != self._rows(len(batches[done])):
                    break
                made = max(1, stop - start)
                yield self._checked(batch, stop - start, made), len(batches[done])
                done += 1

    def _prefetched(
        self, batches: Sequence[list[int]], asked: deque[tuple[int, int]]
    ) -> Iterator[Any]:
        def indices() -> Iterator[list[int]]:
            for batch in batches:
                start, stop = self._rows(len(batch))
                asked.append((start, stop))
                yield batch[start:stop] or batch[:1]

        return iter(
            DataLoader(
                _Named(self.dataset),
                batch_sampler=_Once(indices()),
                collate_fn=_Join(self.collate),
                num_workers=self.num_workers,
                timeout=self.timeout,
                generator=torch.Generator().manual_seed(0),  # the default one is the user's
            )
        )

    def _rows(self, count: int) -> tuple[int, int]:
        start, stop = self.rows_of(count)
        assert 0 <= start <= stop <= count, f"rows [{start}, {stop}) of {count}"
        return start, stop

    def _checked(self, batch: Any, rows: int, made: int) -> Any:
        """The batch, which must have a row per sample; emptied where no row is this rank's."""
        if isinstance(batch, _Fault):
            error = SampleError(batch.sentence)
            error.add_note(batch.traceback)
            raise error
        found = sorted({x.shape[0] for x in pytree.tree_leaves(batch) if _has_rows(x)})
        if found != [made]:
            raise ValueError(
                f"collate made {' and '.join(map(str, found)) or 'no'} rows of {made} samples: "
                "dimension 0 of every tensor of a batch should be its rows"
            )
        if rows:
            return batch
        return pytree.tree_map(lambda x: x[:0] if _has_rows(x) else x, batch)


@dataclass(frozen=True)
class _Fault:
    """A sample that cannot be read. A value: ending a worker that raised takes torch 5 seconds."""

    sentence: str
    traceback: str


class _Join:
    """The user's collate; a fault among the samples becomes the batch."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        faults = [x for x in samples if isinstance(x, _Fault)]
        return faults[0] if faults else self.collate(samples)


class _Named(Dataset[Any]):
    """A data set whose errors name the sample."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return _Fault(
                f"sample {index} of the data set cannot be read: {type(error).__name__}: {error}",
                "".join(format_exception(error)),
            )


class _Once:
    """The lists of indices that workers are given, lazily."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self.indices


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"the data set ({type(dataset).__name__}) should have __len__ and __getitem__: "
            "samples are read by index"
        )
    if isinstance(dataset, Mapping):
        raise ValueError("the data set is a mapping: samples are read by index, 0 to len - 1")
    length = len(dataset)
    if not length:
        raise ValueError("the data set is empty: there is nothing to train on")
    return length
