"""The workers of a plan, played by one process: one where the plan computes what one device does,
else one for each data index (`Plan.sync`)."""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.engine.batches import row_count
from synchromesh.engine.plan_groups import workers
from synchromesh.trace.capture.batch import take, take_parts
from synchromesh.training.trainer import Trainer
from synchromesh.verify.reference import Computed, SingleProcess
from synchromesh.workloads.workload import Workload


class Workers:
    """On rank 0 the references of all workers; the other ranks know their number alone. All ranks
    call alike."""

    def __init__(self, trainer: Trainer, reference: nn.Module, workload: Workload) -> None:
        self._trainer, self._every = trainer, trainer.plan.sync.steps
        self._ranks = _worker_ranks(trainer) if self._every else [None]
        device, autocast = trainer.world.device, trainer.options.autocast
        self._alone = [
            SingleProcess(copy.deepcopy(reference).to(device), workload, device, autocast)
            for _ in (self._ranks if trainer.rank == 0 else ())
        ]
        first = self._alone[0].parameters.values() if self._alone else ()
        self._outer = [(p.detach().clone(), torch.zeros_like(p.detach())) for p in first]
        self._apart = False
        self._late, self._waiting = trainer.plan.sync.late, deque[list[Computed | None]]()
        self._latest: list[Computed | None] = []
        self._made: list[Computed | None] = []
        self._own = self._rows = [0] * len(self._ranks)  # of the last batch, and of all

    def forget_carry(self) -> None:
        for worker in self._alone:
            worker.forget_carry()

    def backward(self, batch: Any) -> None:
        """Of a global batch, each worker with its rows; not one that has none."""
        rows, count = row_count(batch), len(self._ranks)
        parts = [self._trainer.plan.own_rows(rows, count, index) for index in range(count)]
        self._own = [sum(stop - start for start, stop in of) for of in parts]
        self._rows = [before + own for before, own in zip(self._rows, self._own, strict=True)]
        self._made = [None] * count
        for index, worker in enumerate(self._alone):
            if self._own[index]:
                self._made[index] = worker.backward(*self._batches(batch, parts[index]))
        self._latest = self._made
        self._waiting.append(self._made)
        due = len(self._waiting) > self._late
        self._made = self._waiting.popleft() if due else []

    def late(self) -> Iterator[None]:
        """What was made of batches whose gradients are still to come, one after the other."""
        while self._waiting:
            self._made = self._waiting.popleft()
            yield

    def _batches(self, batch: Any, parts: Sequence[tuple[int, int]]) -> list[Any]:
        """A worker's rows, or its micro-batches where batch norm normalises each by itself."""
        if self._trainer.model.statistics:
            return [take(batch, start, stop) for start, stop in parts if start < stop]
        return [batch] if len(self._ranks) == 1 else [take_parts(batch, parts)]

    @property
    def made(self) -> Iterator[tuple[Sequence[int] | None, Computed | None]]:
        """The ranks of each worker that had rows, and on rank 0 what it made of them."""
        known = zip(self._ranks, self._made, self._own, strict=False)
        return ((ranks, made) for ranks, made, rows in known if rows)

    @property
    def joint(self) -> Computed | None:
        """The loss of all rows."""
        return joint_loss([of for of in self._latest if of is not None])

    def gathered(self, gradients: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The plan's gradients on each worker, complete on rank 0."""
        gathered = self._trainer.state.gathered
        return [
            {n: g.clone() for n, g in gathered(gradients, root=0, of=ranks)}
            for ranks in self._ranks
        ]

    def update(self, gradients: Sequence[Mapping[str, Tensor]], step: int) -> None:
        """The step of each worker's optimizer, and the mean where it is due."""
        for worker, own, made in zip(self._alone, gradients, self._made, strict=False):
            if made is not None:
                worker.update(own)
        self._apart = True
        if self._every and step % self._every == 0:
            self._take_mean()

    @torch.no_grad()
    def _take_mean(self) -> None:
        """d = a - mean; m <- 0.9 m + d; a <- a - 0.7 (d + 0.9 m), where there is an outer step."""
        self._apart = False
        for number, parameters in enumerate(
            zip(*(w.parameters.values() for w in self._alone), strict=True)
        ):
            mean = torch.stack([p.detach() for p in parameters]).mean(0)
            if self._trainer.plan.sync.outer_step and parameters[0].requires_grad:
                begun, momentum = self._outer[number]
                moved = begun - mean
                momentum.mul_(0.9).add_(moved)
                mean = begun - 0.7 * (moved + 0.9 * momentum)
                begun.copy_(mean)
            for p in parameters:
                p.copy_(mean)

    def buffers(self) -> Computed | None:
        """Of all workers."""
        return joint_buffers(self._alone, self._latest, self._rows)

    def trained(self) -> Computed | None:
        """The parameters at the end, which are one model's."""
        if self._every and self._apart:
            self._take_mean()
        return self._alone[0].trained() if self._alone else None


def joint_loss(made: Sequence[Computed]) -> Computed | None:
    """The mean of those of parts of a batch, weighted; None of no part."""
    if len(made) < 2:
        return made[0] if made else None
    weights = torch.tensor([float(of.values["weight"][""]) for of in made])
    weights = weights.double() / weights.double().sum()
    losses = torch.stack([of.values["loss"][""].double().cpu() for of in made])
    floors = torch.tensor([of.floors["loss"][""] for of in made]).double()
    value, floor = weights @ losses, float(weights @ floors)
    return Computed({"loss": {"": value}}, {"loss": {"": floor}})


def joint_buffers(
    workers: Sequence[SingleProcess], made: Sequence[Computed | None], rows: Sequence[int]
) -> Computed | None:
    """Means weighted by rows; whole numbers are the first worker's. made: of the last batch."""
    known = [of for of in made if of is not None]
    if len(workers) < 2 or not known:
        return known[0] if known else None
    shares = [n / sum(rows) for n in rows]
    models = [dict(worker.model.named_buffers()) for worker in workers]
    values = dict(models[0])
    for name, first in values.items():
        if first.is_floating_point() or first.is_complex():
            parts = [m[name] * share for m, share in zip(models, shares, strict=True)]
            values[name] = torch.stack(parts).sum(0)
    floors = {name: max(of.floors["buffer"][name] for of in known) for name in values}
    return Computed({"buffer": values}, {"buffer": floors})


def _worker_ranks(trainer: Trainer) -> list[Sequence[int] | None]:
    """The ranks of each data index, over all stages."""
    ranks = trainer.plan.devices(trainer.world.size)
    found = workers(c.layout for c in trainer.partition.components)
    return [[ranks[position] for position in positions] for positions in found]
