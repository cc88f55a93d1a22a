"""A cursor: where a run is in the order of its samples, and in a stream how far it was read.

The order of an epoch follows from the seed, the epoch and the number of samples alone. Global
batch k is entries [k B, (k + 1) B) of it, whatever the plan and however many ranks there are;
which of its rows are this rank's is asked anew for every batch, so that a switch may come in the
middle of an epoch:

    order          7 2 9 0 | 4 1 8 3 | 6 5        10 samples, global batch 4
    rank 0 of 2    7 2       4 1       6
    rank 1 of 2        9 0       8 3     5

What reading samples draws at random depends on their place in the data alone: Python's, numpy's
and torch's own generators are seeded for every reading and are the caller's again behind it. Ranks
that read the same rows draw the same, others draw others, and a resumed run draws what it would
have drawn, whichever process reads."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from synchromesh.values import document

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StreamPlace:
    """How far the substreams of a stream (`data/stream.py`) were read in an epoch."""

    read: Table  # [worker][block]: items that were taken of each substream
    worker: int  # whose substreams the next global batch is of
    states: tuple[tuple[Any, ...], ...]  # of the data set there, as JSON has them, or None

    @classmethod
    def start(cls, workers: int, blocks: int) -> "StreamPlace":
        """Nothing was read of `workers` x `blocks` substreams."""
        return cls(((0,) * blocks,) * workers, 0, ((None,) * blocks,) * workers)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.read), len(self.read[0])

    def to_dict(self) -> dict[str, Any]:
        read, states = ([list(row) for row in table] for table in (self.read, self.states))
        return {"read": read, "worker": self.worker, "states": states}

    @classmethod
    def from_dict(cls, value: Any, name: str) -> "StreamPlace":
        """The inverse of `to_dict`. ValueError for anything else."""
        keys = ("read", "worker", "states")
        item = document.mapping(value, name, keys, keys)
        tables = (document.sequence(row, name) for row in document.sequence(item["read"], name))
        read = tuple(
            tuple(document.integer(n, f"{name}: read", 0, Cursor.MOST) for n in row)
            for row in tables
        )
        rows = document.sequence(item["states"], name)
        states = tuple(tuple(document.sequence(row, name)) for row in rows)
        if not read or len({len(row) for row in (*read, *states)}) > 1 or len(read) != len(states):
            raise ValueError(f"{name}: read and states should be tables of one shape")
        worker = document.integer(item["worker"], f"{name}: worker", 0, len(read) - 1)
        return cls(read, worker, states)


@dataclass(frozen=True)
class Cursor:
    """The next sample to hand out: entry `position` of the order of `epoch`, or of a stream the
    items at `stream` (None: from its start)."""

    seed: int = 0
    epoch: int = 0
    position: int = 0
    stream: StreamPlace | None = None
    samples: int | None = None  # of the data set, where a checkpoint says it
    batch_size: int | None = None  # that was chosen while training, where a checkpoint says it
    MOST: ClassVar[int] = 2**63  # of a number in a document

    def order(self, samples: int, shuffle: bool = True) -> Tensor:
        """The indices of an epoch's samples in order, int64; the same on every rank."""
        if not shuffle:
            return torch.arange(samples)
        generator = torch.Generator().manual_seed(self.mixed(self.seed, self.epoch))
        return torch.randperm(samples, generator=generator)

    @staticmethod
    def mixed(*numbers: int) -> int:
        """A seed of 32 bits, which is what the CPU generator uses of one, made of all numbers."""
        text = "/".join(map(str, numbers))
        return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")

    def after(self, rows: int, stream: StreamPlace | None = None) -> "Cursor":
        """The cursor behind `rows` more samples; stream: how far a stream was read then."""
        return replace(self, position=self.position + rows, stream=stream)

    def to_dict(self) -> dict[str, Any]:
        place = {"seed": self.seed, "epoch": self.epoch, "position": self.position}
        said = {"samples": self.samples, "batch_size": self.batch_size}
        place |= {name: number for name, number in said.items() if number is not None}
        return place if self.stream is None else {**place, "stream": self.stream.to_dict()}

    @classmethod
    def from_dict(cls, value: Any, name: str = "cursor") -> "Cursor":
        """The inverse of `to_dict`. ValueError for anything else; `name` is what it calls it."""
        keys = ("seed", "epoch", "position")
        item = document.mapping(value, name, (*keys, "samples", "batch_size", "stream"), keys)
        least = {"seed": -cls.MOST, "epoch": 0, "position": 0}
        numbers = {k: document.integer(item[k], f"{name}: {k}", least[k], cls.MOST) for k in keys}
        place = item.get("stream")
        stream = None if place is None else StreamPlace.from_dict(place, f"{name}: stream")
        for key, least_of in {"samples": 0, "batch_size": 1}.items():
            if item.get(key) is not None:
                numbers[key] = document.integer(item[key], f"{name}: {key}", least_of, cls.MOST)
        return cls(**numbers, stream=stream)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Inside, `seed_generators` may be called; afterwards all three are as they were."""
    python, numbers, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(host)


def seed_generators(*place: int) -> None:
    """Seeds all three generators by a place."""
    seed = Cursor.mixed(*place)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
