"""The largest numbers: each rank sends those of a bucket whose magnitude is greatest, with their
places; every rank gathers them and adds them up in the order of ranks.

    C(x) = x where |x| is among the k largest, else 0        k = F n, of n numbers

Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", EMNLP; Stich et al.
2018, "Sparsified SGD with Memory", NeurIPS. What is gathered grows with the number of ranks."""

import torch
from torch import Tensor

from synchromesh.compression.compressor import CollectiveCall, Compressor, Rounds


class Largest(Compressor):
    def rounds(self, flags: Tensor) -> Rounds:
        ranks, count, x = self.sizes.ranks, len(flags), self.residual
        places = x.abs().topk(self.sizes.chosen, sorted=False).indices
        numbers = x[places]
        x[places] = 0.0
        sent = torch.cat([numbers.view(torch.uint8), places.int().view(torch.uint8), flags])
        ends = [numbers.nbytes, sent.nbytes - count - numbers.nbytes]
        del places, numbers
        got = yield CollectiveCall("all_gather", sent, ranks * (sent.nbytes - count))
        total = self.zeros(self.sizes.numbers)
        for row in got:
            their, at = row[:-count].split(ends)
            # no place comes twice, so that the order of sums is that of ranks everywhere
            total.index_add_(0, at.clone().view(torch.int32), their.clone().view(self.dtype))
        return total, got[:, -count:].sum(0)
