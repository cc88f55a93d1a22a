"""Totals of a whole batch that a loss divides by, over the rows of all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine import batches
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.pipeline import MicroBatch
from synchromesh.training.active_plan import ActivePlan


def with_totals(
    micro: list[MicroBatch], batch: Any, rows: Sequence[GlobalRows], active: ActivePlan
) -> list[MicroBatch]:
    """The micro-batches of a batch with its totals over all ranks, if any, as more leaves."""
    of_block = micro[0].program.totals if micro else None
    if of_block is None:
        return micro
    totals = _totals(of_block, batch, rows, active)
    return [replace(m, parts=[((x, totals), r) for x, r in m.parts]) for m in micro]


def _totals(
    of_block: Callable[..., Sequence[Tensor]], batch: Any, rows: Sequence[GlobalRows],
    active: ActivePlan,
) -> list[Tensor]:  # fmt: skip
    """Sums over the rows of all ranks. of_block: (rows of a rank, their number) -> its sums"""
    layout, groups = active.leaf_layout, active.groups
    assert groups.position is not None, "an idle rank has no micro-batches"
    count, world = sum(map(active.local_rows, rows)), groups.world
    sums = of_block(batch if count else batches.one_row(batch), count or 1)
    flat = torch.cat([x.reshape(-1).double() for x in sums]).to(world.device)
    if not count or layout.first or layout.tensor_index(groups.position):  # or another's rows
        flat.zero_()
    work = groups.everyone.all_reduce(flat, asynchronous=True, counted=False)
    if work is not None:
        world.wait(work)
    parts = zip(flat.split([x.numel() for x in sums]), sums, strict=True)
    return [part.to(x.dtype).reshape(x.shape) for part, x in parts]
