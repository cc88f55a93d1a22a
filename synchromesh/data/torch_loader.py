"""What a torch `DataLoader` says of its samples, batches and workers, as a `Loader` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from synchromesh.data.cursor import Cursor, preserved_generators, seed_generators
from synchromesh.data.fetch import OF_WORKERS


@dataclass(frozen=True)
class TorchLoader:
    """A `DataLoader` of global batches: the words of `Trainer.loader` for it."""

    loader: DataLoader[Any]

    def __post_init__(self) -> None:
        """ValueError where it reads in a way that has no such words."""
        loader, kind = self.loader, type(self.loader)
        batches = getattr(loader, "batch_sampler", None)
        remedy = ""
        if kind.__iter__ is not DataLoader.__iter__:
            remedy = f"{kind.__name__} iterates in a way of its own: give its data set"
        elif batches is not None and type(batches) is not BatchSampler:
            remedy = "it has a batch_sampler: give it batch_size and sampler"
        elif loader.batch_size is None:
            remedy = "it has batch_size=None: give it the rows of a global batch"
        elif isinstance(loader.sampler, DistributedSampler):
            remedy = (
                "its DistributedSampler gives each rank other samples: leave it out, and give "
                "batch_size as that of all ranks together"
            )
        elif self.sampler is not None and not getattr(self.sampler, "__len__", int)():
            remedy = (
                f"its sampler ({type(self.sampler).__name__}) has no len, or one of 0: give it "
                "__len__, the number of samples of an epoch"
            )
        if remedy:
            raise ValueError(f"the DataLoader cannot be taken over, as {remedy}")

    @property
    def batch_size(self) -> int:
        """Rows over all ranks."""
        assert self.loader.batch_size is not None  # refused above
        return self.loader.batch_size

    @property
    def seed(self) -> int | None:
        """Of its generator, where it has one."""
        generator = self.loader.generator
        return None if generator is None else generator.initial_seed() % Cursor.MOST

    @property
    def shuffle(self) -> bool:
        """Whether each epoch is a permutation of all samples."""
        sampler = self.loader.sampler
        plain = type(sampler) is RandomSampler and not sampler.replacement
        return plain and len(sampler) == len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def sampler(self) -> Any:
        """Its order, where that is neither the data set's nor a permutation."""
        sampler = self.loader.sampler
        stream = isinstance(self.loader.dataset, IterableDataset)
        return None if stream or self.shuffle or type(sampler) is SequentialSampler else sampler

    @property
    def options(self) -> Mapping[str, Any]:
        """As `Loading` has them."""
        loader = self.loader
        options = {"num_workers": loader.num_workers, "pin_memory": loader.pin_memory}
        if loader.num_workers:
            options |= {name: getattr(loader, name) for name in OF_WORKERS}
        return options


def drawn(sampler: Any, cursor: Cursor) -> list[int]:
    """The order of the cursor's epoch by a sampler, all of whose generators are seeded by seed
    and epoch; they are the caller's again behind it."""
    if callable(set_epoch := getattr(sampler, "set_epoch", None)):
        set_epoch(cursor.epoch)
    seed = Cursor.mixed(cursor.seed, cursor.epoch)
    own = getattr(sampler, "generator", None)
    with preserved_generators():
        seed_generators(seed)
        if not isinstance(own, torch.Generator):
            return [*map(int, sampler)]
        before = own.get_state()
        own.manual_seed(seed)
        try:
            return [*map(int, sampler)]
        finally:
            own.set_state(before)
