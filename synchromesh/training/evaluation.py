"""Evaluation: a metric's means over the rows of a loader, by all ranks under the plan in force."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine import batches
from synchromesh.engine.control_channel import EVALUATE, EVALUATED, checked_gather
from synchromesh.engine.pipeline import PipelineWalk
from synchromesh.engine.world import World
from synchromesh.trace.capture.carry import Carrying
from synchromesh.trace.capture.outputs import refuse_loss
from synchromesh.training.carry import Carry
from synchromesh.training.execution import Execution

Metric = Callable[..., Any]  # (model, batch) -> {name: sum}, or with a carry


def means(
    execution: Execution, loader: Iterable[Any], metric: Metric, steps: int,
    place: Callable[[], str],
) -> dict[str, float]:  # fmt: skip
    """As `Trainer.evaluate`. steps: updates done, for random operators. place: where in the data
    the last batch is of."""
    world = execution.world
    sums: dict[str, Tensor] = {}
    count = 0
    carry = Carry(execution.options.carry, world)
    function = Carrying(metric) if execution.options.carry else metric
    refuse_loss(execution.losses.turn_of(execution.traces.canonical(function)) is not None)
    with torch.no_grad(), execution.streams.preserved():
        for raw in loader:
            execution.traces.look()
            marks = execution.marks(raw, steps, place())
            batch = batches.to_device(raw, world.device)
            rows = execution.active.agree(batch, marks, method=EVALUATE)
            if not rows.total:
                continue
            count += rows.total
            batch = carry.joined(batch, rows, execution.active)
            micro = execution.micro_batches(batch, rows.micro_batches(), function)
            if not micro:
                carry.advance({})
                continue
            walk = PipelineWalk(micro, execution.active.groups, steps, 0, apart=1)
            for result in walk.forward():
                if result.leads and result.rows:
                    for name, value in zip(result.names, result.outputs, strict=True):
                        known = sums.get(name, torch.zeros((), dtype=torch.float64))
                        sums[name] = known + value.double().cpu()
            carry.advance(walk.carry())
    checked_gather(world.everyone, EVALUATED)
    return _over_ranks(world, sums, count)


def _over_ranks(world: World, sums: Mapping[str, Tensor], count: int) -> dict[str, float]:
    if not count:
        raise ValueError("there is nothing to evaluate: the loader gave no rows")
    of_ranks = world.everyone.all_gather_json(list(sums))
    rank, names = next(((r, n) for r, n in enumerate(of_ranks) if n), (0, []))
    if not names:
        return {}
    for other, theirs in enumerate(of_ranks):
        if theirs and set(theirs) != set(names):  # a rank without rows has none
            raise ValueError(
                f"the metric gives {', '.join(names)} on rank {rank} and {', '.join(theirs)} on "
                f"rank {other}: it should give the same names on all ranks"
            )
    zero = torch.zeros((), dtype=torch.float64)
    total = torch.stack([sums.get(name, zero) for name in names]).to(world.device)
    world.everyone.all_reduce(total, counted=False)
    return {name: float(value) / count for name, value in zip(names, total, strict=True)}
