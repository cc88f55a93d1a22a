"""What a torch `DataLoader` says of its samples, batches and workers, as a `Loader` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
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
        batches = loader.batch_sampler
        remedy = ""
        if kind.__iter__ is not DataLoader.__iter__:
            remedy = f"{kind.__name__} iterates in a way of its own: give its data set"
        elif batches is None:
            remedy = "it has batch_size=None: give it the rows of a global batch"
        elif type(batches) is not BatchSampler:
            remedy = (
                f"its batch_sampler ({type(batches).__name__}) makes batches of its own: give it "
                "batch_size and sampler"
            )
        elif isinstance(batches.sampler, DistributedSampler):
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
    def batches(self) -> BatchSampler:
        """Its size of a batch, that over all ranks, and its order of samples."""
        assert type(self.loader.batch_sampler) is BatchSampler  # refused above
        return self.loader.batch_sampler

    @property
    def seed(self) -> int | None:
        """Of its generator, or its sampler's, where it has one."""
        generators = (self.loader.generator, getattr(self.batches.sampler, "generator", None))
        made = next((g for g in generators if isinstance(g, torch.Generator)), None)
        return None if made is None else made.initial_seed() % Cursor.MOST

    @property
    def shuffle(self) -> bool:
        """Whether each epoch is a permutation of all samples."""
        sampler = self.batches.sampler
        plain = type(sampler) is RandomSampler and not sampler.replacement
        return plain and len(sampler) == len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def sampler(self) -> Any:
        """Its order, where that is neither the data set's nor a permutation."""
        sampler = self.batches.sampler
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


def same_order(a: Any, b: Any) -> bool:
    """Whether two samplers are one, made anew: of one class and equal attributes."""
    if a is b or type(a) is not type(b) or not hasattr(a, "__dict__"):
        return a is b

    def equal(name: str) -> bool:
        x, y = vars(a).get(name), vars(b).get(name)
        if isinstance(x, (Tensor, np.ndarray)):
            return type(x) is type(y) and np.array_equal(x, y)
        return x is y or isinstance(x, torch.Generator) or (type(x) is type(y) and bool(x == y))

    return vars(a).keys() == vars(b).keys() and all(map(equal, vars(a)))


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
