"""Batches: nests of tensors whose first dimension is rows; this rank's part and micro-batches."""

import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from synchromesh.engine.groups import Group
from synchromesh.engine.movable import bytes_of
from synchromesh.trace.capture.batch import row_count as row_count
from synchromesh.values.layout import Layout
from synchromesh.values.plan import Plan

Ranges = tuple[tuple[int, int], ...]
TELLING_ENTRIES = 16  # fewer may be equal on two ranks by chance; chosen


def to_device(batch: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), batch)


def leaves(batch: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)]


def split(rows: int, parts: int) -> Ranges:
    """`rows` in `parts` balanced ranges, the first ones one row longer."""
    sizes = (rows // parts + (i < rows % parts) for i in range(parts))
    ends = tuple(accumulate(sizes))
    return tuple(zip((0, *ends[:-1]), ends, strict=True))


def count_of(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def one_row(batch: Any) -> Any:
    """The batch, with one row of zeros where it has none."""

    def one(x: Any) -> Any:
        empty = isinstance(x, Tensor) and x.dim() and not x.shape[0]
        return x.new_zeros((1, *x.shape[1:])) if empty else x

    return pytree.tree_map(one, batch)


@dataclass(frozen=True)
class GlobalRows:
    """The rows of one global batch: how many each data index of the finest layout has. apart:
    workers go on without each other, and others are taken to have as many rows as this one."""

    counts: tuple[int, ...]
    plan: Plan
    apart: bool = False
    _ranges: dict[int, Ranges] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def ranges(self, data: int) -> Ranges:
        """Global [start, stop) per data index of a layout of `data` degrees. Where `data` divides
        the finest degree its blocks are unions of the finest ones, else the plan's."""
        if data not in self._ranges:
            finest = len(self.counts)
            ends = (0, *accumulate(self.counts))
            of_finest = () if finest % data else tuple(pairwise(ends[:: finest // data]))
            self._ranges[data] = of_finest or self.plan.row_ranges(self.total, data)
        return self._ranges[data]

    @classmethod
    def of(cls, total: int, data: int, plan: Plan) -> "GlobalRows":
        return cls(tuple(b - a for a, b in plan.row_ranges(total, data)), plan)

    def micro_batches(self) -> tuple["GlobalRows", ...]:
        """The micro-batches of the plan, each of which lies on the data ranks of every stage."""
        if self.plan.micro_batches == 1:
            return (self,)
        data = len(self.counts)
        cuts = self.plan.micro_rows(self.total)
        if self.apart:
            sizes = (b - a for a, b in self.plan.micro_rows(self.counts[0]))
            return tuple(GlobalRows((n,) * data, self.plan, True) for n in sizes)
        return tuple(GlobalRows.of(b - a, data, self.plan) for a, b in cuts)

    def micro(self, parts: int) -> tuple["GlobalRows", ...]:
        """The micro-batches when every data index cuts its own rows into `parts`."""
        cuts = [split(n, parts) for n in self.counts]
        sizes = [tuple(b - a for a, b in (cut[i] for cut in cuts)) for i in range(parts)]
        return tuple(GlobalRows(counts, self.plan) for counts in sizes)


def with_stand_in(
    batch: Any, rows: GlobalRows, layout: Layout, position: int, group: Group
) -> Any:
    """The batch; where position has no rows under `layout`, the first row of the first that has.
    group: of all positions. Those of `layout` call; nothing is sent where all have rows."""
    counts = [stop - start for start, stop in rows.ranges(layout.data)]
    if all(counts):
        return batch
    has = {p: counts[layout.data_index(p)] for p in layout.positions}
    source = next(p for p, count in has.items() if count)
    without = [p for p, count in has.items() if not count]
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []

    def stand_in(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim()):
            return x
        if position == source:
            sends.extend((p, x[:1].contiguous()) for p in without)
        elif position in without:
            x = x.new_zeros((1, *x.shape[1:]))
            receives.append((source, x))
        return x

    batch = pytree.tree_map(stand_in, batch)
    with group.world.ledger.paused():  # no traffic of a step: no plan foresees it
        group.exchange(sends, receives)
    return batch


def fingerprint(key: Hashable) -> int:
    """A 63-bit number that equal keys share on every rank and in every run."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def tells_ranks_apart(batch: Any) -> bool:
    """Whether equal rows on two ranks cannot be chance: there are some entries, and they differ
    between the first row and the last, or within the only one."""
    tensors = [x for x in leaves(batch) if x.dim() and x.numel()]
    if sum(x.numel() for x in tensors) < TELLING_ENTRIES:
        return False
    rows = (x if len(x) > 1 else x.reshape(-1) for x in tensors)
    return any(bool((x[0] != x[-1]).any()) for x in rows)


def checksum(batch: Any, entire: bool = False) -> int:
    """A checksum of some 1,024 entries of each tensor, or all; equal for ranks with equal rows."""
    total = 0
    for x in leaves(batch):
        flat = x.reshape(-1)
        # odd: one that divides the width of images would read a column
        every = 1 if entire else flat.numel() // 1024 | 1
        total = zlib.crc32(bytes_of(flat[::every]), total)
    return total
