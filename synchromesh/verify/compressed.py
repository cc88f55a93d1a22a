"""Compressed sums, played again: what the compressors of all ranks of a sum make of the gradients
that each of them had, in one process and without process groups."""

from collections.abc import Mapping

import torch
from torch import Tensor

from synchromesh.compression import compressors
from synchromesh.compression.compressor import played
from synchromesh.training.trainer import Trainer
from synchromesh.verify.reference import Computed


class PlayedCompression:
    """Residuals of all ranks of this rank's sums, from the first step on. All ranks call alike."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._sides = []
        for bucket in trainer.sums.now.compressed:
            bucket.keeps_own = True
            sizes, like = bucket.compressor.sizes, bucket.flat
            self._sides.append([compressors.of(sizes, i, like) for i in range(sizes.ranks)])

    def step(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What ranks had, summed without a loss, and what compressors make of it, as shards like
        `gradients`, in the place of those that are compressed."""
        whole, lossy = dict(gradients), dict(gradients)
        names = {p: n for n, p in self._trainer.model.parameters.items()}
        summing = self._trainer.sums.now
        for bucket, sides in zip(summing.compressed, self._sides, strict=True):
            assert bucket.own is not None
            flags = torch.tensor(bucket.filled).to(bucket.own)
            rows = bucket.group.all_gather(torch.cat([bucket.own, flags]), counted=False)
            numbers, given = rows.split([len(bucket.own), len(flags)], 1)
            had = zip(sides, numbers, given.bool().tolist(), strict=True)
            total, counts = played([side.sum(own, flags) for side, own, flags in had])[0]
            parameters = [item.parameter for item in bucket.items]
            ends = [p.numel() for p in parameters]
            for p, count, exact, sent in zip(
                parameters, counts, numbers.sum(0).split(ends), total.split(ends), strict=True
            ):
                if count:
                    whole[names[p]] = exact.view(p.shape) * summing.scale
                    lossy[names[p]] = sent.view(p.shape).to(p.dtype) * summing.scale
        return whole, lossy


def as_reference(gradients: Mapping[str, Tensor]) -> Computed:
    """Complete gradients to compare others with, which may have added up in another order."""
    floors = {
        n: float(x.abs().max()) * torch.finfo(x.dtype).eps if x.numel() else 0.0
        for n, x in gradients.items()
    }
    return Computed({"compressed": dict(gradients)}, {"compressed": floors})
