"""A compressor: the sum of a bucket's gradients over ranks that send less than all of them, and
what each owes the sums to come.

Error feedback (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", ICML, algorithm 2), of the gradient g_i of rank i:

    x_i = g_i + e_i        sum over i of C(x_i) is what all ranks get        e_i <- x_i - C(x_i)

A compressor is written as one rank's side of its collectives: a generator that yields what it
sends and is given what it receives. The engine carries that out with process groups, and whoever
plays all ranks in one process with tensors (`played`)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from synchromesh.values.compression import CompressedSizes
from synchromesh.values.traffic import CollectiveKind


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that is to be carried out.

    all_reduce: `sent` of any shape, whose sum comes back. all_gather: (n,), of which (ranks, n)
    comes back. all_to_all: (ranks, n), a row for each rank, and as many that come back. payload:
    bytes that it is counted by, without the flags that go along."""

    kind: CollectiveKind
    sent: Tensor
    payload: int


Rounds = Generator[CollectiveCall, Tensor, tuple[Tensor, Tensor]]  # returns the sum, and counts


class Compressor:
    """One rank's side, with the residual e that it keeps from step to step.

    index: of the rank. Numbers are those of the bucket in order, in at least float32."""

    def __init__(self, sizes: CompressedSizes, index: int, like: Tensor) -> None:
        """like: of the type of gradients, on their device."""
        self.sizes, self.index = sizes, index
        self.dtype, self.device = torch.promote_types(like.dtype, torch.float32), like.device
        self.residual = self.zeros(sizes.numbers)

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.dtype, device=self.device)

    @property
    def kept(self) -> list[Tensor]:
        """What is kept from step to step, by place in the bucket or not."""
        return [self.residual]

    def sum(self, gradient: Tensor, given: Sequence[bool]) -> Rounds:
        """The sum over all ranks, and how many of them had a gradient of each tensor.

        given: which this rank has; of others there are zeros. What is owed to a tensor that no
        rank has a gradient of stays owed, as nobody takes its sum."""
        before = None if all(given) else self.owed()
        self.residual[: self.sizes.numbers].add_(gradient)
        flags = torch.tensor(given, dtype=torch.uint8, device=self.device)
        total, counts = yield from self.rounds(flags)
        self.residual.nan_to_num_(0.0, 0.0, 0.0)  # what is not finite has been sent as such
        if before is not None:
            self._stay_owed(before, counts.tolist())
        return total, counts

    def rounds(self, flags: Tensor) -> Rounds:
        """From x in the place of the residual."""
        raise NotImplementedError

    def owed(self) -> Tensor:
        """This rank's part of what is owed, by place in the bucket: all ranks' add up to it."""
        return self.residual[: self.sizes.numbers].clone()

    def owe(self, owed: Tensor) -> None:
        """This, and nothing else, is this rank's part of what is owed."""
        self.residual[: self.sizes.numbers].copy_(owed)

    def _stay_owed(self, before: Tensor, counts: Sequence[float]) -> None:
        owed, start = self.owed(), 0
        for shape, count in zip(self.sizes.shapes, counts, strict=True):
            stop = start + torch.Size(shape).numel()
            if not count:
                owed[start:stop] = before[start:stop]
            start = stop
        self.owe(owed)


def played(sums: Sequence[Rounds]) -> list[tuple[Tensor, Tensor]]:
    """What all ranks come to, whose sides one process plays."""
    done: list[tuple[Tensor, Tensor]] = []
    requests = [next(side) for side in sums]
    while not done:
        received, requests = _carried_out(requests), []
        for side, got in zip(sums, received, strict=True):
            try:
                requests.append(side.send(got))
            except StopIteration as over:
                done.append(over.value)
    return done


def _carried_out(requests: Sequence[CollectiveCall]) -> list[Tensor]:
    sent = torch.stack([request.sent for request in requests])
    match requests[0].kind:
        case "all_reduce":
            return [sent.sum(0) for _ in requests]
        case "all_gather":
            return [sent for _ in requests]
        case _:
            return [*sent.transpose(0, 1)]
