"""Compressed sums, played again: what the compressors of all ranks of a sum make of the gradients
that each of them had, in one process and without process groups."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from synchromesh.compression import compressors
from synchromesh.compression.compressor import Compressor, played
from synchromesh.engine.gradient_buckets import CompressedBucket
from synchromesh.training.trainer import Trainer
from synchromesh.verify.reference import Computed


class PlayedCompression:
    """Residuals of all ranks of this rank's sums, from the first step on. All ranks call alike.

    What is all-reduced adds up in an order of the backend's own. How far that moves a tensor is
    seen by playing all ranks once more the other way round; what is sent otherwise (codes, the
    largest numbers) has one order, and one rounding would be an error."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._relative: dict[str, float] = {}  # how far, over the largest entry, the most so far
        self._sides: list[list[Compressor]] = []
        self._moved: list[list[Compressor]] = []
        for bucket in trainer.sums.now.compressed:
            bucket.keeps_own = True
            self._sides.append(_sides(bucket))
            summed = bucket.compressor.sizes.payloads[0][0] == "all_reduce"
            self._moved.append(_sides(bucket) if summed else [])

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Computed | None]:
        """What ranks had, summed without a loss, as shards like `gradients`, in the place of those
        that are compressed; and what compressors make of it, complete, on rank 0."""
        whole, lossy = dict(gradients), dict(gradients)
        buckets = self._trainer.sums.now.compressed
        for bucket, sides, moved in zip(buckets, self._sides, self._moved, strict=True):
            had, total, other = _played(bucket, sides, moved)
            whole |= self._parts(bucket, had)
            lossy |= self._parts(bucket, total)
            self._note(self._parts(bucket, total), self._parts(bucket, other))
        complete = dict(self._trainer.state.gathered(lossy))
        known = self._trainer.world.everyone.all_gather_json(self._relative)
        floors = {}
        for name, x in complete.items():
            least = torch.finfo(x.dtype).eps if x.dtype.is_floating_point else 0.0
            relative = max(least, *(of.get(name, 0.0) for of in known))
            floors[name] = relative * _largest(x)
        made = Computed({"compressed": complete}, {"compressed": floors})
        return whole, made if self._trainer.rank == 0 else None

    def _parts(self, bucket: CompressedBucket, numbers: Tensor) -> dict[str, Tensor]:
        """The gradients of those that have one, as they are scaled in the end."""
        names = {p: n for n, p in self._trainer.model.parameters.items()}
        parameters = [item.parameter for item in bucket.items]
        parts = numbers.split([p.numel() for p in parameters])
        scale = self._trainer.sums.now.scale
        return {
            names[p]: x.view(p.shape).to(p.dtype) * scale
            for p, x in zip(parameters, parts, strict=True)
            if p.grad is not None
        }

    def _note(self, made: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
        for name, x in made.items():
            relative = _largest(x - other[name]) / (_largest(x) or 1.0)
            self._relative[name] = max(relative, self._relative.get(name, 0.0))


def _sides(bucket: CompressedBucket) -> list[Compressor]:
    sizes = bucket.compressor.sizes
    return [compressors.of(sizes, i, bucket.flat) for i in range(sizes.ranks)]


def _played(
    bucket: CompressedBucket, sides: Sequence[Compressor], moved: Sequence[Compressor]
) -> tuple[Tensor, Tensor, Tensor]:
    """What ranks had, as a sum; what comes of it; and what would, summed the other way round."""
    assert bucket.own is not None
    flags = torch.tensor(bucket.filled).to(bucket.own)
    rows = bucket.group.all_gather(torch.cat([bucket.own, flags]), counted=False)
    numbers, given = rows.split([len(bucket.own), len(flags)], 1)
    had = [*zip(numbers, given.bool().tolist(), strict=True)]

    def total(of: Sequence[Compressor], had: Sequence[tuple[Tensor, list[bool]]]) -> Tensor:
        return played([side.sum(*own) for side, own in zip(of, had, strict=True)])[0][0]

    made = total(sides, had)
    return numbers.sum(0), made, total(moved, had[::-1]) if moved else made


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
