"""The sum of gradients over ranks: buckets, sent while backward still runs.

Parameters are assigned to buckets by `values/buckets.py`, and buckets start in a fixed order, so
that every rank sends alike and a resumed run adds up in the order of the first one (DDP, which
rebuilds its buckets after the first step, does not)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.engine.buckets import Bucket, Summed, bucket_of
from synchromesh.values import buckets
from synchromesh.values.buckets import UNDER_WAY, SendingOrder

Order = SendingOrder[Bucket]


def _order() -> Order:
    return SendingOrder(lambda bucket: bucket.ready)


class GradientSync:
    """Sums gradients over each parameter's group: `begin`, `complete` before the last backward of
    some parameters, `end_backward` after each one, `finish`.

    Until `begin` gradients accumulate as ever; those that are summed after every backward are
    added up in `parameter.grad`. All ranks of a group give the same parameters in the same order;
    where a group is one rank nothing is copied. When a parameter gets data of another shape,
    `close` and make another."""

    def __init__(self, parameters: Sequence[Summed], *, late: bool = False) -> None:
        """late: buckets start in `finish`, or when a backward is over: when no other collective of
        backward is under way."""
        self._late = late
        self._alone = [p.parameter for p in parameters if p.group.size == 1]
        shared = [p for p in parameters if p.group.size > 1]
        filled = buckets.fill(shared, _kind, lambda item: item.size)
        self._buckets = [bucket_of(items) for items in filled]
        self._last = _order()  # of buckets that are summed once
        self._every: dict[int, Order] = {}  # by stage: of those that are summed in each backward
        for bucket in self._buckets:
            self._order_of(bucket).buckets.append(bucket)
        self._under_way: list[Bucket] = []
        self._armed = False
        self._complete: set[nn.Parameter] = set()  # after the backward to come
        self._hooks = [
            item.leaf.register_post_accumulate_grad_hook(self._hook(bucket, index))
            for bucket in self._buckets
            for index, item in enumerate(bucket.items)
        ]

    def _order_of(self, bucket: Bucket) -> Order:
        first = bucket.items[0]
        return (
            self._every.setdefault(first.stages[0], _order())
            if first.each_backward
            else self._last
        )

    def _hook(self, bucket: Bucket, index: int) -> Any:
        item, order = bucket.items[index], self._order_of(bucket)

        def ready(leaf: Tensor) -> None:
            if not item.each_backward and not (self._armed and item.parameter in self._complete):
                return
            assert item.each_backward or not bucket.filled[index], "a gradient is complete once"
            assert leaf.grad is not None
            bucket.fill(index, leaf.grad)
            if item.part_placement.sharded:
                item.group.world.advance()
            if bucket.ready and not self._late:
                self._launch(order.ready())

        return ready

    def _launch(self, ready: Sequence[Bucket]) -> None:
        for bucket in ready:
            bucket.launch()
            if bucket in self._under_way:
                self._under_way.remove(bucket)
            if bucket.items[0].part_placement.sharded:
                self._under_way.append(bucket)
            if len(self._under_way) > UNDER_WAY:
                self._under_way.pop(0).finish()

    def begin(self) -> None:
        """The accumulation ends with the backwards to come: its gradients will be summed."""
        for bucket in self._last.buckets:
            bucket.forget()  # a step that failed half-way
        self._last.restart()
        self._complete.clear()
        self._armed = True

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these are complete with the next backward."""
        self._complete.update(parameters)

    def end_backward(self, stage: int) -> None:
        """A backward of a stage is over: what is summed in each one is on its way."""
        if stage in self._every:
            self._launch(self._every[stage].rest())
            self._every[stage].restart()

    def finish(self, scale: float | None = None) -> None:
        """After it every gradient is the sum over its group, times `scale`, on all ranks."""
        assert self._armed, "begin comes before finish"
        self._armed = False
        for bucket in self._last.rest():
            for index, item in enumerate(bucket.items):
                # had a gradient in an earlier micro-batch only
                if not bucket.filled[index] and item.leaf.grad is not None:
                    bucket.fill(index, item.leaf.grad)
            self._launch([bucket])
        for bucket in self._buckets:
            bucket.finish()
        self._under_way.clear()
        for p in self._alone:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()  # as where gradients are summed
        if scale is None:
            return
        shared = (item.parameter for bucket in self._buckets for item in bucket.items)
        found = [p.grad for p in (*shared, *self._alone) if p.grad is not None]
        if found:
            torch._foreach_mul_(found, scale)

    def abandon(self) -> None:
        """After a backward that failed: the next one sums nothing until `begin`."""
        self._armed = False
        self._under_way.clear()
        for bucket in self._buckets:
            if bucket.items[0].part_placement.sharded:
                bucket.forget()
                for item in bucket.items:  # of earlier micro-batches
                    item.leaf.grad = None
        for order in self._every.values():
            order.restart()

    def close(self) -> None:
        """Takes the hooks away; gradients stay as they are."""
        for hook in self._hooks:
            hook.remove()
        for bucket in self._buckets:
            bucket.finish()
        self._hooks, self._buckets, self._alone, self._every = [], [], [], {}
        self._last = _order()
        self._armed = False


def _kind(item: Summed) -> tuple[Any, ...]:
    """What gradients have in common that can be summed together."""
    parameter = item.parameter
    when = item.stages if item.each_backward else None
    return item.group.ranks, parameter.dtype, parameter.device, item.part_placement.sharded, when
