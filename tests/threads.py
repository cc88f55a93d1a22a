"""Ranks as threads of one process: `spin(m, function)` calls `function(group)` in m threads
that can meet.

Their group has the collectives of `engine.groups.Group` and a ledger; autograd on CPU runs
backward in the thread that asks for it, so collectives in backward meet too. Ten times quicker
than processes. The moves are written from the definition of placements, not from the engine's
table.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from synchromesh.values.placement import Placement, parse
from synchromesh.values.traffic import CollectiveKind, sent_bytes


class Meeting:
    """Where the threads put what they have and look at what the others have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, index: int, item: Any) -> list[Any]:
        self.table[index] = item
        self.barrier.wait()
        found = list(self.table)
        self.barrier.wait()
        return found


class ThreadGroup:
    """One thread's view of the meeting."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index, self.size = meeting, index, meeting.size
        self.sent: Counter[str] = Counter()
        self.calls = 0

    def count(self, kind: CollectiveKind, x: Tensor, times: int = 1) -> None:
        self.sent[kind] += sent_bytes(kind, x.numel() * x.element_size() * times, self.size)
        self.calls += 1

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        self.count("all_reduce", x)
        every = torch.stack(self.meeting.exchange(self.index, x.detach().clone()))
        x.copy_(every.sum(0) if op == "sum" else every.amax(0))

    def all_gather(self, x: Tensor) -> Tensor:
        self.count("all_gather", x, self.size)
        return torch.stack(self.meeting.exchange(self.index, x.detach().clone()))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.count("reduce_scatter", x)
        return torch.stack(self.meeting.exchange(self.index, x.detach().clone())).sum(0)[
            self.index
        ]


def spin(size: int, function: Callable[[ThreadGroup], Any]) -> list[Any]:
    """`function(group)` in `size` threads; their results, or the first error."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(index: int) -> None:
        try:
            results[index] = function(ThreadGroup(meeting, index))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not meeting.barrier.broken, "a thread waited in vain"
    return results


def part(x: Tensor, state: Placement, size: int, index: int) -> Tensor:
    """What rank `index` of `size` holds of the whole `x` under a sharded placement."""
    boxes = state.boxes(tuple(x.shape), size, index)
    return torch.cat([x[tuple(slice(a, b) for a, b in box)] for box in boxes], state.dim)


def join(parts: Sequence[Tensor], state: Placement) -> Tensor:
    """The whole of all ranks' parts."""
    n, dim = state.segments, state.dim
    chunks = [p.split(p.shape[dim] // n, dim) if p.shape[dim] else [p] * n for p in parts]
    return torch.cat([c[i] for i in range(n) for c in chunks], dim)


VALUE = {"R": "R", "r": "R", "P": "P", "S": "S"}  # of a placement: how the value lies
GRADIENT = {"R": "R", "r": "P", "P": "R", "S": "S"}  # and the gradient


def convert(
    x: Tensor, group: ThreadGroup, before: str, source: Placement, after: str, target: Placement
) -> Tensor:
    """A tensor that lies as `before` (R, P or S as `source` says) so that it lies as `after`."""
    size, index = group.size, group.index
    if before == "P":
        if after == "P":
            return x
        if after == "R":
            x = x.clone()
            group.all_reduce(x)
            return x
        group.count("reduce_scatter", part(x, target, size, 0), size)
        every = group.meeting.exchange(index, x.detach().clone())
        return part(torch.stack(every).sum(0), target, size, index)
    if before == "R":
        return {"R": lambda: x, "P": lambda: x / size, "S": lambda: part(x, target, size, index)}[
            after
        ]()
    parts = group.meeting.exchange(index, x.detach().clone())
    if after == "P":
        return join(
            [x if i == index else torch.zeros_like(p) for i, p in enumerate(parts)], source
        )
    if after == "R":
        group.count("all_gather", parts[0], size)
        return join(parts, source)
    group.count("all_to_all", parts[0])
    return part(join(parts, source), target, size, index)


class Move(torch.autograd.Function):
    """A move, by the definition of placements: values forward, gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ThreadGroup, a: Placement, b: Placement) -> Tensor:
        ctx.way = group, a, b
        return convert(x, group, VALUE[a.kind], a, VALUE[b.kind], b).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        group, a, b = ctx.way
        return convert(gradient, group, GRADIENT[b.kind], b, GRADIENT[a.kind], a), None, None, None


class ThreadAxis:
    """The tensor axis of one thread; implements `synchromesh.trace.rules.operator.TensorAxis`."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group, self.size, self.index = group, group.size, group.index

    def move(self, x: Tensor, source: str, target: str, length: int = 0) -> Tensor:
        return Move.apply(x, self.group, parse(source), parse(target))  # type: ignore[no-any-return]

    def maximum(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        self.group.all_reduce(x, "max")
        return x

    def stream(self, key: int, sharded: bool, rows: bool) -> None:
        pass

    def batch_norm(self, *args: Any) -> Tensor:
        return torch.batch_norm(*args, False)
