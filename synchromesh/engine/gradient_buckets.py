"""Buckets of gradients that every rank gets the sum of, as they are or compressed.

A gradient is copied once, into its bucket. Each bucket ends with one number for each parameter,
how many ranks had a gradient: where none had, `grad` stays None."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from synchromesh.compression import compressors
from synchromesh.compression.compressor import CollectiveCall, Rounds
from synchromesh.engine.groups import Group
from synchromesh.programs.communicator import Finish
from synchromesh.values.buckets import BucketKind
from synchromesh.values.compression import CompressedSizes
from synchromesh.values.holding import Holding
from synchromesh.values.placement import REPLICATED, Placement
from synchromesh.values.traffic import Servers


@dataclass(frozen=True)
class Summed:
    """A parameter whose gradient is summed over a group.

    whole: what programs compute with, where this rank keeps a part of it, along `part_placement`.
    each_backward: whether it is summed after each backward, of the first of `stages`, the pipeline
    stages of this rank that use it: what the others' backwards give has been added up by then.
    most_bytes: of the gradient on any rank, by which all of them fill equal buckets; None: as on
    this one. compressor: what it is sent by; "": as it is. servers: who has the parts; None: all
    have one."""

    parameter: nn.Parameter
    group: Group
    whole: nn.Parameter | None = None
    part_placement: Placement = REPLICATED
    each_backward: bool = False
    stages: tuple[int, ...] = (0,)
    most_bytes: int | None = None
    compressor: str = ""
    servers: Servers | None = None

    @classmethod
    def of(
        cls, holding: Holding, parameter: nn.Parameter, whole: nn.Parameter | None, group: Group,
        stages: tuple[int, ...],
    ) -> "Summed":  # fmt: skip
        """Of a parameter that lies so."""
        size, word = holding.local_bytes, holding.compressor
        if not holding.scattered:
            return cls(parameter, group, stages=stages, most_bytes=size, compressor=word)
        part, each = holding.part_placement, holding.each_backward
        return cls(parameter, group, whole, part, each, stages, size, word, holding.serving)

    @property
    def leaf(self) -> nn.Parameter:
        """What backward makes the gradient of."""
        return self.parameter if self.whole is None else self.whole

    @property
    def size(self) -> int:
        """Bytes that its gradient counts for in a bucket."""
        return self.leaf.nbytes if self.most_bytes is None else self.most_bytes

    @property
    def kind(self) -> BucketKind:
        """What it has in common with those that share its bucket."""
        ranks, of = self.group.ranks, (self.parameter.dtype, self.parameter.device)
        part, stages = self.part_placement, self.stages
        served = self.servers is not None
        return BucketKind.of(ranks, of, part, stages, self.each_backward, self.compressor, served)


class SummedSlice(NamedTuple):
    """Entries [start, stop) of a parameter, in the order of its dimensions, whose sum has come;
    last: with them all of it."""

    parameter: nn.Parameter
    start: int
    stop: int
    last: bool

    @classmethod
    def of_all(cls, parameter: nn.Parameter) -> "SummedSlice":
        return cls(parameter, 0, parameter.numel(), True)

    @property
    def whole(self) -> bool:
        return self.last and not self.start

    @property
    def gradient(self) -> Tensor | None:
        """Of these entries."""
        gradient = self.parameter.grad
        if gradient is None or self.whole:
            return gradient
        return gradient.view(-1)[self.start : self.stop]


class Bucket:
    """Parameters of one kind whose gradients are sent together: `fill` for each, `launch`,
    `finish`."""

    def __init__(self, items: Sequence[Summed]) -> None:
        self.items, self.group, self.kind = items, items[0].group, items[0].kind
        self.reset()

    def reset(self) -> None:
        """Makes the bucket ready for another backward."""
        self.filled = [False] * len(self.items)
        self.waiting = len(self.items)

    def fill(self, index: int, gradient: Tensor) -> None:
        """Takes one gradient in."""
        self.waiting -= not self.filled[index]
        self.filled[index] = True

    def launch(self) -> None:
        """Starts the sum; gradients that are missing here count as zero."""
        raise NotImplementedError

    def advance(self) -> None:
        """Begins what comes behind the first collective, where something does."""

    def finish(self) -> None:
        """Waits for the sum, where it was started; `grad` of each parameter has it then."""
        raise NotImplementedError

    def arrive(self) -> Iterator[list[SummedSlice]]:
        """As `finish`; what has come, as it comes."""
        self.finish()
        yield [SummedSlice.of_all(item.parameter) for item in self.items]

    def fill_accumulated(self) -> None:
        """Takes in what only an earlier micro-batch gave a gradient of."""
        for index, item in enumerate(self.items):
            if not self.filled[index] and item.leaf.grad is not None:
                self.fill(index, item.leaf.grad)

    def forget(self) -> None:
        """After a step that failed, maybe on this rank alone: what is on its way is of no use."""
        self.reset()


class FlatBucket(Bucket):
    """Gradients that every rank gets the sum of: they lie in one flat tensor from the first step
    on, and `parameter.grad` is a view of it."""

    def __init__(self, items: Sequence[Summed]) -> None:
        parameters = [item.parameter for item in items]
        numbers = sum(p.numel() for p in parameters)
        first = parameters[0]
        self.flat = torch.zeros(numbers + len(parameters), dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        start = 0
        for p in parameters:
            self.views.append(_like(p, self.flat[start : start + p.numel()]))
            start += p.numel()
        self.counts = self.flat[numbers:]
        self.payload = numbers * first.element_size()
        self.work: Any = None
        self._given: dict[int, Tensor] = {}  # gradients that are not copied yet, by index
        super().__init__(items)

    def fill(self, index: int, gradient: Tensor) -> None:
        """Takes one gradient in, which is copied with the others."""
        if gradient is not self.views[index]:
            self._given[index] = gradient.to_dense() if gradient.is_sparse else gradient
        super().fill(index, gradient)

    def launch(self) -> None:
        """Starts the all-reduce; `grad` of each parameter becomes a view of what is summed."""
        self.collect()
        self.group.world.ledger.add("all_reduce", self.payload, self.group.size)
        self.work = self.group.all_reduce(self.flat, asynchronous=True, counted=False)

    def collect(self) -> None:
        """All gradients are in the flat tensor."""
        if self._given:
            torch._foreach_copy_([self.views[i] for i in self._given], [*self._given.values()])
            for index in self._given:
                self.items[index].parameter.grad = self.views[index]
            self._given.clear()
        if self.waiting:  # parameters without a gradient here, which other ranks may have
            for view, filled in zip(self.views, self.filled, strict=True):
                if not filled:
                    view.zero_()
            self.counts.copy_(torch.tensor(self.filled, dtype=self.flat.dtype))
        else:
            self.counts.fill_(1)

    def finish(self) -> None:
        """Waits for the sum; gradients that other ranks alone had appear."""
        if self.work is None:
            return
        self.group.world.wait(self.work)
        self.work = None
        self.appear()

    def appear(self) -> None:
        """Gradients that other ranks alone had, by their counts."""
        if self.waiting:
            gradients = zip(self.items, self.views, self.filled, self.counts.tolist(), strict=True)
            for item, view, filled, count in gradients:
                if not filled and count:
                    item.parameter.grad = view

    def forget(self) -> None:
        """See `Bucket.forget`; waits for it, as its memory is used again."""
        if self.work is not None:
            self.group.world.wait(self.work)
            self.work = None
        self._given.clear()
        super().forget()


class CompressedBucket(FlatBucket):
    """Gradients that ranks send compressed (`compression/`), in one or two collectives: the first
    begins while backward runs, the second when all first ones have begun."""

    def __init__(self, items: Sequence[Summed]) -> None:
        super().__init__(items)
        shapes = [item.parameter.shape for item in items]
        parts = self.flat.split([*(shape.numel() for shape in shapes), len(shapes)])
        # entries in the order of dimensions, as matrices have them
        self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
        dtype = str(self.flat.dtype).removeprefix("torch.")
        sizes = CompressedSizes.of(
            self.kind.compressor, map(tuple, shapes), dtype, self.group.size
        )
        self.numbers = self.flat[: sizes.numbers]
        self.compressor = compressors.of(sizes, self.group.index, self.flat)
        self.own: Tensor | None = None  # the gradients of this rank alone, where they are kept
        self.keeps_own = False
        self._rounds: Rounds | None = None
        self._finish: Finish | None = None

    def launch(self) -> None:
        """Starts the first collective."""
        self.collect()
        self.own = self.numbers.clone() if self.keeps_own else None
        self._rounds = self.compressor.sum(self.numbers, self.filled)
        self._finish = self._begin(next(self._rounds))

    def advance(self) -> None:
        if self._rounds is None or self._finish is None:
            return
        received, self._finish = self._finish(), None
        try:
            self._finish = self._begin(self._rounds.send(received))
        except StopIteration as over:
            total, counts = over.value
            self.numbers.copy_(total)
            self.counts.copy_(counts)
            self._rounds = self._finish = None
            self.appear()

    def finish(self) -> None:
        while self._rounds is not None:
            self.advance()

    def _begin(self, request: CollectiveCall) -> Finish:
        sent, group = request.sent, self.group
        if request.kind == "all_to_all":
            return group.start_transpose(sent, request.payload)
        group.world.ledger.add(request.kind, request.payload, group.size)
        if request.kind == "all_gather":
            return group.start_all_gather(sent, counted=False)
        work = group.all_reduce(sent, asynchronous=True, counted=False)
        return group.world.after(work, lambda: sent)

    def forget(self) -> None:
        """See `Bucket.forget`; what is owed is forgotten with a step that failed half-way."""
        if self._finish is not None:
            self._finish()
            self._rounds = self._finish = None
            self.compressor.owe(torch.zeros_like(self.numbers))
        super().forget()


def _like(p: Tensor, flat: Tensor) -> Tensor:
    """A view of `flat` laid out as `p`, so that the optimizer runs along both."""
    dense = sorted(zip(p.stride(), p.shape, strict=True))
    expected = 1
    for stride, length in dense:
        if length != 1 and stride != expected:
            return flat.view(p.shape)
        expected *= length
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
