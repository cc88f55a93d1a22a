"""Data sets for tests of loaders: samples by index, streams of every kind."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from synchromesh.data.loader import Batching

IN_ORDER = Batching(shuffle=False)
FULL = Batching(shuffle=False, drop_last=True)


class Numbers(Dataset[Any]):
    """Sample i is (the vector (i, i), the label i)."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count, self.bad = count, bad
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("disk on fire")
        self.read.append(index)
        return item(index)


def item(index: int) -> Any:
    return torch.full((2,), float(index)), index


class Stream(IterableDataset[Any]):
    """Items 0, 1, ... of epoch 0, 100, 101, ... of epoch 1; where several workers read, each
    gives every so manieth. `read` are those that were given out in this process."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count, self.bad, self.epoch = count, bad, 0
        self.read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.count, by):
            if index == self.bad:
                raise OSError("disk on fire")
            self.read.append(index)
            yield item(100 * self.epoch + index)


class Sized(Stream):
    """A stream that says its length."""

    def __len__(self) -> int:
        return self.count


class Stateful(Stream):
    """A stream that goes on where its state says, and cannot be read from its start then."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        start, self.resumed = (self.position if self.resumed else 0), False
        for index in range(start, self.count):
            self.position = index + 1
            self.read.append(index)
            yield item(100 * self.epoch + index)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.resumed = state["position"], True


class Sharded(IterableDataset[Any]):
    """Files of items, of which a shard has every so manieth, as Hugging Face's `IterableDataset`:
    in a worker it shards itself by `get_worker_info`. Items are 1000 epochs + 100 files + places.
    """

    def __init__(self, *files: int, numbers: tuple[int, ...] | None = None, states: bool = True):
        self.files, self.epoch = files, 0
        self.numbers = tuple(range(len(files))) if numbers is None else numbers
        self.read: list[int] = []
        self.place, self.start, self.states = (0, 0), (0, 0), states

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        part = type(self)(
            *self.files[index::num_shards], numbers=self.numbers[index::num_shards],
            states=self.states,
        )  # fmt: skip
        part.read = self.read
        return part

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            yield from self.shard(info.num_workers, info.id)
            return
        (file, place), self.start = self.start, (0, 0)
        for i in range(file, len(self.files)):
            for j in range(place if i == file else 0, self.files[i]):
                self.place = (i, j + 1)
                number = 1000 * self.epoch + 100 * self.numbers[i] + j
                self.read.append(number)
                yield item(number)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict") and self.__dict__.get("states"):
            return getattr(self, f"_{name}")
        raise AttributeError(name)

    def _state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["epoch"] == self.epoch
        self.start = state["place"]
