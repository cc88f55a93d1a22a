"""The sum of gradients over ranks: flat buckets, all-reduced while backward still runs.

Parameters are assigned to buckets by `values/buckets.py`, and buckets start in a fixed order, so
that every rank sends alike and a resumed run adds up in the order of the first one (DDP, which
rebuilds its buckets after the first step, does not). A gradient is copied once, into its bucket;
afterwards `parameter.grad` is a view of it. Each bucket ends with one number for each parameter,
how many ranks had a gradient: where none had, `grad` stays None.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.engine.groups import Group
from synchromesh.values import buckets
from synchromesh.values.buckets import SIZES, BucketSizes


class _FlatBucket:
    """Parameters of one group and dtype whose gradients lie in one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter], group: Group) -> None:
        self.parameters, self.group = parameters, group
        numbers = sum(p.numel() for p in parameters)
        first = parameters[0]
        self.flat = torch.zeros(numbers + len(parameters), dtype=first.dtype, device=first.device)
        self.views: list[Tensor] = []
        start = 0
        for p in parameters:
            self.views.append(_like(p, self.flat[start : start + p.numel()]))
            start += p.numel()
        self.values, self.counts = self.flat[:numbers], self.flat[numbers:]
        self.payload = numbers * first.element_size()
        self.reset()

    def reset(self) -> None:
        """Makes the bucket ready for another backward."""
        self.filled = [False] * len(self.parameters)
        self.waiting = len(self.parameters)
        self.work: Any = None

    def fill(self, index: int, gradient: Tensor) -> None:
        """Takes one gradient in; the parameter's `grad` becomes the view of it."""
        view = self.views[index]
        if gradient is not view:
            view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            self.parameters[index].grad = view
        self.filled[index] = True
        self.waiting -= 1

    def launch(self) -> None:
        """Starts the all-reduce."""
        if self.waiting:  # parameters without a gradient here, which other ranks may have
            for view, filled in zip(self.views, self.filled, strict=True):
                if not filled:
                    view.zero_()
            present = torch.tensor(self.filled, dtype=self.flat.dtype)
            self.counts.copy_(present)
        else:
            self.counts.fill_(1)
        self.group.world.ledger.add("all_reduce", self.payload, self.group.size)
        self.work = self.group.all_reduce(self.flat, asynchronous=True, counted=False)

    def finish(self, scale: float | None) -> None:
        """Waits for the sum; gradients that other ranks alone had appear."""
        if self.work is not None:
            self.group.world.wait(self.work)
            self.work = None
        if scale is not None:
            self.values.mul_(scale)
        if self.waiting:
            counts = self.counts.tolist()
            for p, view, filled, count in zip(
                self.parameters, self.views, self.filled, counts, strict=True
            ):
                if not filled and count:
                    p.grad = view


class GradientSync:
    """Sums gradients over each parameter's group: `begin`, `complete` before the last backward of
    some parameters, `finish`.

    Until `begin` gradients accumulate in `parameter.grad` as ever. All ranks of a group give the
    same parameters in the same order; where a group is one rank nothing is copied. When a
    parameter gets data of another shape, `close` and make another.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Group]],
        sizes: BucketSizes = SIZES,
        *,
        late: bool = False,
    ) -> None:
        """late: buckets start in `finish`, when no other collective of backward is under way."""
        self._late = late
        self._alone = [p for p, group in parameters if group.size == 1]
        shared = [(p, group) for p, group in parameters if group.size > 1]
        self._buckets = [
            _FlatBucket([p for p, _ in filled], filled[0][1])
            for filled in buckets.fill(shared, _kind, lambda item: item[0].nbytes, sizes)
        ]
        self._armed = False
        self._complete: set[nn.Parameter] = set()  # after the backward to come
        self._next = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self._buckets
            for index, p in enumerate(bucket.parameters)
        ]

    def _hook(self, bucket: _FlatBucket, index: int) -> Any:
        def ready(parameter: Tensor) -> None:
            if not self._armed or parameter not in self._complete:
                return
            assert not bucket.filled[index], "a gradient is complete once between begin and finish"
            assert parameter.grad is not None
            bucket.fill(index, parameter.grad)
            if not bucket.waiting and not self._late:
                self._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        """Starts full buckets in their order, which is that of every rank."""
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._buckets[self._next].launch()
            self._next += 1

    def begin(self) -> None:
        """The accumulation ends with the backwards to come: its gradients will be summed."""
        for bucket in self._buckets:
            if bucket.work is not None:  # a step that failed half-way
                bucket.work.wait()
            bucket.reset()
        self._armed, self._next = True, 0
        self._complete.clear()

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete with the next backward."""
        self._complete.update(parameters)

    def finish(self, scale: float | None = None) -> None:
        """After it every gradient is the sum over its group, times `scale`, on all ranks."""
        assert self._armed, "begin comes before finish"
        self._armed = False
        for bucket in self._buckets[self._next :]:
            for index, p in enumerate(bucket.parameters):
                # had a gradient in an earlier micro-batch only
                if not bucket.filled[index] and p.grad is not None:
                    bucket.fill(index, p.grad)
            bucket.launch()
        self._next = len(self._buckets)
        for bucket in self._buckets:
            bucket.finish(scale)
        for p in self._alone:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # as where gradients are summed
        own = [p.grad for p in self._alone if p.grad is not None]
        if scale is not None and own:
            torch._foreach_mul_(own, scale)

    def abandon(self) -> None:
        """After a backward that failed: the next one sums nothing until `begin`."""
        self._armed = False

    def close(self) -> None:
        """Takes the hooks away; gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        self._hooks, self._buckets, self._alone = [], [], []
        self._armed = False


def _kind(item: tuple[nn.Parameter, Group]) -> tuple[Any, ...]:
    """What gradients have in common that can lie in one flat tensor and be summed together."""
    parameter, group = item
    return group.ranks, parameter.dtype, parameter.device


def _like(p: Tensor, flat: Tensor) -> Tensor:
    """A view of `flat` laid out as `p`, so that the optimizer runs along both."""
    dense = sorted(zip(p.stride(), p.shape, strict=True))
    expected = 1
    for stride, length in dense:
        if length != 1 and stride != expected:
            return flat.view(p.shape)
        expected *= length
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
