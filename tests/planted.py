"""Errors that are planted into a run, to see that `verify` finds them.

element        one entry of one gradient is wrong on one rank, after the sum
rank           what one rank adds to gradients is wrong
row            one row of every batch is lost
bucket twice   one bucket of gradients is summed twice
stale bucket   one rank keeps a bucket of the step before
stale buffer   one rank's running statistics are those of the step before
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.engine import batches
from synchromesh.engine.gradients import FlatBucket, GradientSync
from synchromesh.trace.capture.batch import take
from synchromesh.training.trainer import Trainer

KINDS = ("element", "rank", "row", "bucket twice", "stale bucket", "stale buffer")
SIZED = KINDS[:2]
DIVIDED = ("bucket twice", "stale bucket")  # of plans that divide rows: others have no buckets
# An element is drawn among those that are no rounding: of tensors of at least this part of the
# model's largest gradient, the entries of at least this part of the tensor's largest.
SEEN = 1e-3


@dataclass(frozen=True)
class Planted:
    """An error: its kind, on which rank, its size relative to the right value, and where else it
    is up to chance, the seed of that."""

    kind: str
    rank: int
    size: float = 0.0
    seed: int = 0


@contextmanager
def planted(error: Planted | None) -> Iterator[None]:
    """Inside, on every rank, training has the error."""
    with pytest.MonkeyPatch.context() as patch:
        if error is not None:
            {
                "element": _element, "rank": _rank, "row": _row, "bucket twice": _twice,
                "stale bucket": _stale_bucket, "stale buffer": _stale_buffer,
            }[error.kind](patch, error)  # fmt: skip
        yield


def _element(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = Trainer.backward

    def backward(trainer: Trainer, *args: Any) -> Tensor:
        value = right(trainer, *args)
        gradients = [g for g in trainer.gradients().values() if g.numel()]
        chance = random.Random(error.seed)
        if trainer.rank == error.rank and gradients:
            largest = max(float(g.abs().max()) for g in gradients)
            seen = [g for g in gradients if g.abs().max() >= SEEN * largest]
            g = chance.choice(seen)
            entry = chance.choice((g.abs() >= SEEN * g.abs().max()).nonzero().tolist())
            g[tuple(entry)] *= 1 + error.size
        return value

    patch.setattr(Trainer, "backward", backward)


def _rank(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = Trainer.backward

    def backward(trainer: Trainer, *args: Any) -> Tensor:
        hooks = [
            p.register_hook(lambda g: g * (1 + error.size))
            for p in trainer.model.parameters.values()
            if p.requires_grad and trainer.rank == error.rank
        ]
        value = right(trainer, *args)
        for hook in hooks:
            hook.remove()
        return value

    patch.setattr(Trainer, "backward", backward)


def _row(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = Trainer.shard

    def shard(trainer: Trainer, batch: Any) -> Any:
        return right(trainer, take(batch, 0, batches.row_count(batch) - 1))

    patch.setattr(Trainer, "shard", shard)


def _bucket(sync: GradientSync, error: Planted) -> FlatBucket:
    bucket = sync._buckets[error.seed % len(sync._buckets)]
    assert isinstance(bucket, FlatBucket)
    return bucket


def _twice(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = GradientSync.finish

    def finish(sync: GradientSync, *given: Any) -> None:
        right(sync, *given)
        bucket = _bucket(sync, error)
        bucket.group.all_reduce(bucket.flat, counted=False)

    patch.setattr(GradientSync, "finish", finish)


def _stale_bucket(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = GradientSync.finish
    before: list[Tensor] = []

    def finish(sync: GradientSync, *given: Any) -> None:
        right(sync, *given)
        bucket = _bucket(sync, error)
        now = bucket.flat.clone()
        if before and bucket.group.world.rank == error.rank:
            bucket.flat.copy_(before.pop())
        before[:] = [now]

    patch.setattr(GradientSync, "finish", finish)


def _stale_buffer(patch: pytest.MonkeyPatch, error: Planted) -> None:
    right = Trainer.backward

    def backward(trainer: Trainer, *args: Any) -> Tensor:
        kept = {n: b.clone() for n, b in trainer.model.buffers.items()}
        value = right(trainer, *args)
        if trainer.rank == error.rank:
            name = random.Random(error.seed).choice(changed(trainer.model.module, kept))
            trainer.model.buffers[name].copy_(kept[name])
        return value

    patch.setattr(Trainer, "backward", backward)


def changed(module: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The buffers that a step has changed."""
    return [n for n, b in module.named_buffers() if not torch.equal(b, before[n])]
