"""The sum of gradients over ranks: buckets, sent while backward still runs.

Parameters are assigned to buckets, and these are sent, by `values/buckets.py`: in a fixed order,
so that every rank sends alike and a resumed run adds up in the order of the first one (DDP, which
rebuilds its buckets after the first step, does not).

Buckets of which every rank gets all are in `gradient_buckets.py`, those of which each gets a part
are here."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from synchromesh.engine.gradient_buckets import (
    Bucket,
    CompressedBucket,
    FlatBucket,
    Summed,
    SummedSlice,
)
from synchromesh.engine.servers import PushUnderWay
from synchromesh.engine.sharding import parts_of
from synchromesh.programs.communicator import Finish
from synchromesh.values import buckets
from synchromesh.values.buckets import BucketEvent, BucketKind, Sending, SendingRules

Ahead = Callable[[Sequence[SummedSlice]], None]
Sums = Iterator[tuple[int, int, Tensor]]  # entries [start, stop) of a bucket, with their sum


class ScatterBucket(Bucket):
    """Gradients of which every rank gets the sum of its own part: they lie in one tensor while
    they are sent, the parts of a rank one after the other, and are added to `parameter.grad`."""

    def __init__(self, items: Sequence[Summed], messages: int = 1) -> None:
        """messages: in which each server gets its part."""
        self._messages = messages
        self._flat: Tensor | None = None
        self._coming: Sums | None = None
        self._forgotten: Sums | None = None  # to be waited for before the next one starts
        self._partial = False  # whether gradients were missing here in what is under way
        serving = items[0].servers
        self._parts = items[0].group.size if serving is None else serving.count
        self._offsets = [0]
        for item in items:
            largest = item.part_placement.local_shape(tuple(item.leaf.shape), self._parts)
            self._offsets.append(self._offsets[-1] + torch.Size(largest).numel())
        super().__init__(items)

    def fill(self, index: int, gradient: Tensor) -> None:
        """Takes one gradient in, which is freed; adds it to what another stage's backward gave."""
        self.finish()  # of the backward before
        item, start = self.items[index], self._offsets[index]
        flat, take = self._tensor(), Tensor.add_ if self.filled[index] else Tensor.copy_
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        for ranks, view in parts_of(dense, item.part_placement, self._parts):
            shape = view.shape[1:]
            take(flat[ranks, start : start + shape.numel()].unflatten(1, shape), view)
        item.leaf.grad = None
        super().fill(index, gradient)

    def _tensor(self) -> Tensor:
        """(parts, what each of those who keep them gets)"""
        if self._flat is None:
            first, numbers = self.items[0].leaf, self._offsets[-1]
            # zeros: parts that are smaller than the largest one leave entries that are sent too
            self._flat = first.new_zeros(self._parts, numbers + len(self.items)).detach()
        return self._flat

    def launch(self) -> None:
        """Starts the reduce-scatter, or the push."""
        self.finish()
        for _ in self._forgotten or ():
            pass
        self._forgotten = None
        flat, numbers = self._tensor(), self._offsets[-1]
        flat[:, numbers:] = torch.tensor(self.filled, dtype=flat.dtype, device=flat.device)
        size, group, servers = numbers * flat.element_size(), self.group, self.items[0].servers
        if servers:
            payload, _ = servers.sent(size, group.index, group.size)
            push = PushUnderWay(group, servers, flat, len(self.items), payload, self._messages)
            self._coming = push.sums()
        else:
            self._coming = _at_once(group.start_reduce_scatter(flat, group.size * size), flat)
        self._partial = self.waiting > 0
        self.reset()  # the next backward fills it anew while this one's sum is under way

    def finish(self) -> None:
        """Waits for the sum and adds it up."""
        for _ in self.arrive():
            pass

    def arrive(self) -> Iterator[list[SummedSlice]]:
        """See `Bucket.arrive`."""
        if self._coming is None:  # it has come, after an earlier backward
            yield [SummedSlice.of_all(item.parameter) for item in self.items]
            return
        coming, self._coming, self._flat = self._coming, None, None
        parameters, partial = [item.parameter for item in self.items], self._partial
        counts = dict.fromkeys(parameters, 1.0)
        first = {p for p in parameters if p.grad is None}
        for number, (start, stop, part) in enumerate(coming):
            if partial and not number:
                counts = dict(zip(parameters, part[-len(parameters) :].tolist(), strict=True))
            came = [*self._slices(start, stop, not number)]
            for at, each in came:
                if counts[each.parameter]:
                    _add(each, part[at - start :], each.parameter in first)
            yield [each for _, each in came]

    def _slices(self, start: int, stop: int, first: bool) -> Iterator[tuple[int, SummedSlice]]:
        """What lies in a message, with where it begins; in the first one also what is empty."""
        for item, low, high in zip(self.items, self._offsets, self._offsets[1:], strict=False):
            begin, end = max(start, low), min(stop, high)
            if begin < end or (first and low == high):
                of = item.parameter.numel()
                own = min(begin - low, of), min(end - low, of)
                yield begin, SummedSlice(item.parameter, *own, end == high)

    def forget(self) -> None:
        """See `Bucket.forget`; the next launch waits for it."""
        self._forgotten, self._coming = self._coming or self._forgotten, None
        self._flat = None
        super().forget()


def _at_once(finish: Finish, flat: Tensor) -> Sums:
    yield 0, flat.shape[1], finish()


def _add(came: SummedSlice, sums: Tensor, first: bool) -> None:
    """To the gradient of these entries. first: which has none before."""
    p, own = came.parameter, sums[: came.stop - came.start]
    if first and came.whole:
        p.grad = own.view(p.shape)
        return
    if p.grad is None:
        p.grad = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    of = p.grad.view(-1)[came.start : came.stop]
    (of.copy_ if first else of.add_)(own)


def bucket_of(items: Sequence[Summed], total: int) -> Bucket:
    """total: bytes of all of its kind."""
    if items[0].part_placement.sharded:
        served, size = items[0].servers is not None, sum(item.size for item in items)
        return ScatterBucket(items, buckets.SIZES.messages(size, total) if served else 1)
    return CompressedBucket(items) if items[0].compressor else FlatBucket(items)


class GradientSync:
    """Sums gradients over each parameter's group: `begin`, `complete` before the last backward of
    some parameters, `end_backward` after each one, `finish`.

    Until `begin` gradients accumulate as ever; those that are summed after every backward are
    added up in `parameter.grad`. All ranks of a group give the same parameters in the same order;
    where a group is one rank nothing is copied. When a parameter gets data of another shape,
    `close` and make another."""

    def __init__(
        self, parameters: Sequence[Summed], *, late: bool = False, sparse: bool = False
    ) -> None:
        """late: buckets start in `finish`, or when a backward is over: when no other collective of
        backward is under way. sparse: whether gradients that are not summed may be."""
        self._sparse = sparse
        self._alone = [p.parameter for p in parameters if p.group.size == 1]
        shared = [p for p in parameters if p.group.size > 1]
        filled = buckets.fill(shared, lambda item: item.kind, lambda item: item.size)
        total = Counter[BucketKind]()
        for item in shared:
            total[item.kind] += item.size
        self._buckets = [self._bucket(items, total[items[0].kind]) for items in filled]
        items = [(b.kind, range(len(b.items))) for b in self._buckets]
        self._sending = Sending(items, SendingRules(late=late))
        self._armed = False
        self.scale = 1.0  # by which the last sums were multiplied
        self._complete: set[nn.Parameter] = set()  # after the backward to come
        self._hooks = [
            item.leaf.register_post_accumulate_grad_hook(self._hook(number, index))
            for number, bucket in enumerate(self._buckets)
            for index, item in enumerate(bucket.items)
            if item.leaf.requires_grad  # else it was frozen since, and is traced anew
        ]

    def _bucket(self, items: Sequence[Summed], total: int) -> Bucket:
        return bucket_of(items, total)

    def take(self) -> bool:
        """Gradients become sums that are still under way behind a step; whether there are any."""
        return False

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        bucket = self._buckets[number]
        item = bucket.items[index]

        def filled(leaf: Tensor) -> None:
            each = item.each_backward
            if leaf.grad is None:  # autograd came here with nothing: what uses it is detached
                return
            if not each and not (self._armed and item.parameter in self._complete):
                return
            assert each or not bucket.filled[index], "a gradient is complete once"
            self._carry_out(self._sending.open(number))
            bucket.fill(index, leaf.grad)
            if bucket.kind.scattered:
                bucket.group.world.advance()
            self._carry_out(self._sending.fill(number, index))

        return filled

    def _carry_out(self, events: Iterable[BucketEvent]) -> None:
        for event in events:
            bucket = self._buckets[event.bucket]
            match event.verb:
                case "send":
                    bucket.launch()
                case "await":
                    bucket.finish()

    @property
    def compressed(self) -> list[CompressedBucket]:
        """The buckets that are sent compressed, in their order."""
        return [b for b in self._buckets if isinstance(b, CompressedBucket)]

    @property
    def _summed_once(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if not bucket.kind.stages]

    def begin(self) -> None:
        """The accumulation ends with the backwards to come: its gradients will be summed."""
        for bucket in self._summed_once:
            bucket.forget()  # a step that failed half-way
        self._sending.begin()
        self._complete.clear()
        self._armed = True

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete with the next backward."""
        self._complete.update(parameters)

    def end_backward(self, stage: int) -> None:
        """A backward of a stage is over: what is summed in each one is on its way."""
        self._carry_out(self._sending.end_backward(stage))

    def finish(self, scale: float | None = None, ahead: Ahead | None = None) -> None:
        """After it every gradient is the sum over its group, times `scale`, on all ranks. ahead:
        is called with what has come as soon as it has, scaled."""
        assert self._armed, "begin comes before finish"
        self._armed = False
        for event in self._sending.finish():
            if event.verb == "send":
                self._buckets[event.bucket].fill_accumulated()
            self._carry_out([event])
        for bucket in self._buckets:
            bucket.advance()
        self.scale = 1.0 if scale is None else scale
        for came in self._sums():
            self._scale(each.gradient for each in came)
            if ahead is not None:
                ahead(came)
        for p in self._alone:
            if p.grad is not None and p.grad.is_sparse and not self._sparse:
                p.grad = p.grad.to_dense()  # as where gradients are summed
        self._scale(p.grad for p in self._alone)

    def _sums(self) -> Iterator[list[SummedSlice]]:
        """Waits for the sums; what has come, as it comes."""
        for bucket in self._buckets:
            yield from bucket.arrive()

    def _scale(self, gradients: Iterable[Tensor | None]) -> None:
        there = [gradient for gradient in gradients if gradient is not None]
        if self.scale != 1.0 and there:
            torch._foreach_mul_(there, self.scale)

    def abandon(self) -> None:
        """After a backward that failed: the next one sums nothing until `begin`."""
        self._armed = False
        self._sending.abandon()
        for bucket in self._buckets:
            if bucket.kind.scattered:
                bucket.forget()
                for item in bucket.items:  # of earlier micro-batches
                    item.leaf.grad = None

    def close(self) -> None:
        """Takes the hooks away; gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()
        if not any(bucket.group.world.lost for bucket in self._buckets):
            for _ in self._sums():  # else nobody may come to the sum
                pass
        self._hooks, self._buckets, self._alone = [], [], []
        self._sending = Sending([])
        self._armed = False
