"""A pipeline that stays filled, as the trainer sees it: one without a flush between steps.

The backwards and the optimizer's steps of a batch go on behind later batches' forwards
(engine/unflushed_walk.py). Nothing that all ranks know of a step is waited for in it: rows are
compared steps later (engine/late_agreement.py), the loss is told when somebody reads it."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.agreement import LossSum
from synchromesh.engine.late_agreement import LateAgreement
from synchromesh.engine.pipeline import MicroBatch, Seeds
from synchromesh.engine.program import RankOutputs
from synchromesh.engine.stashed_weights import StashedWeights
from synchromesh.engine.unflushed_walk import UnflushedWalk
from synchromesh.programs.model import Model
from synchromesh.trace.capture.outputs import refuse_metrics
from synchromesh.trace.partition.local import users_of
from synchromesh.trace.step import Report
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.gradient_sums import GradientSums
from synchromesh.training.loss_sums import LateLoss, add_loss, refuse_sums
from synchromesh.training.reports import Reports, add_reports
from synchromesh.values.layout import stages_of


@dataclass
class _Share:
    """What the backward of a micro-batch needs. share: its part of the rows of an update. rows: of
    all data ranks. totals: S and W of a loss (S, W) over these, `work` what to wait for."""

    share: float
    rows: int
    totals: Tensor | None = None
    work: Any = None


class FilledPipeline:
    """Of the plan in force, on one rank; all call alike.

    noted: is called before each step of the optimizer, when parameters have gradients. late: of so
    many of the last steps the loss is waited for where it is read"""

    def __init__(self, active: ActivePlan, model: Model, sums: GradientSums) -> None:
        kept, groups, made = active.plan.kept, active.groups, active.partition.components
        position = groups.position
        assert kept is not None and position is not None, "no rank is idle"
        layouts = [local.layout for local in made]
        ranges = stages_of(layouts)
        stage = next(s for s, its in enumerate(ranges) if position in layouts[its[0]].positions)
        trained = [model.parameters[n] for n, users in users_of(made).items() if stage in users]
        self.noted: Callable[[], None] = lambda: None
        self.stash = StashedWeights(trained, kept.behind(stage))
        self._active, self._sums, self._of_step = active, sums, kept.of_step
        self._data = groups.data_group(layouts[ranges[stage][-1]])  # which have a loss's rows
        self._walk = UnflushedWalk(groups, stage, kept, self.stash, self._seeds, self._step)
        self._shares: dict[int, _Share] = {}  # by micro-batch under way
        self._losses: deque[LateLoss] = deque()  # that are not known yet
        self.late = kept.steps(active.plan.micro_batches)

    def run(
        self, micro_batches: Sequence[MicroBatch], step: int, of: Sequence[Report],
        reports: Reports,
    ) -> LateLoss:  # fmt: skip
        """A step of these micro-batches; its loss. of: what they report, which comes to `reports`.
        ValueError for losses of steps before that were none."""
        world, everyone = self._active.groups.world, self._active.groups.everyone
        self._sums.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn
        sums = torch.zeros(len(LossSum) + 2 * len(of), dtype=torch.float64, device=world.device)
        rows = sum(m.rows.total for m in micro_batches)
        counts = [m.rows.total for m in micro_batches]
        first = self._walk.coming

        def forwarded(number: int, results: Sequence[RankOutputs]) -> None:
            count = counts[number - first]
            self._shares[number] = _Share(count / rows if self._of_step else 1.0, count)
            for result in results:
                self._add(self._shares[number], result, sums)
                add_reports(of, result, sums[len(LossSum) :])

        self._walk.run(micro_batches, step, forwarded)
        work = everyone.all_reduce(sums, asynchronous=True, counted=False)

        def find() -> Tensor:
            world.wait(work)
            values = sums.tolist()
            refuse_sums(values)
            reports.add(of, values[len(LossSum) :], rows, True)
            return sums[LossSum.VALUE] / sums[LossSum.WEIGHT]

        loss = LateLoss.of(find)
        self._losses.append(loss)
        self._know(self.late)
        return loss

    def drain(self) -> None:
        """The optimizer has made all steps, of which all ranks know."""
        self._walk.drain()
        agreement = self._active.agree_step
        assert isinstance(agreement, LateAgreement)
        agreement.drain()
        self._know(0)

    def _know(self, but: int) -> None:
        while len(self._losses) > but:
            self._losses.popleft().known()

    def _add(self, share: _Share, result: RankOutputs, sums: Tensor) -> None:
        refuse_metrics(result.names)
        if not result.outputs:
            return
        add_loss(result, sums)
        if len(result.outputs) == 2:
            totals = torch.stack([x.detach().double() for x in result.outputs])
            share.totals = totals if result.rows else totals.zero_()
            share.work = self._data.all_reduce(share.totals, asynchronous=True, counted=False)

    def _seeds(self, number: int, results: Sequence[RankOutputs]) -> Seeds:
        """Outputs with their part of the gradient of the mean of a micro-batch.

        L = S / W       dL = (dS - L dW) / W"""
        share, seeds = self._shares.pop(number), Seeds()
        for result in (r for r in results if r.outputs):
            value, *of_pair = result.outputs
            weight = share.share * result.rows / share.rows
            if of_pair:
                weight, mean = self._of_totals(share, result.rows)
                seeds.append((of_pair[0], torch.full_like(of_pair[0], -mean * weight)))
            seeds.append((value, torch.full_like(value, weight)))
        return seeds

    def _of_totals(self, share: _Share, rows: int) -> tuple[float, float]:
        """What S counts for, and L; of a micro-batch in which nothing counts, nothing."""
        assert share.totals is not None
        if share.work is not None:
            self._active.groups.world.wait(share.work)
        value, weight = share.totals.tolist()
        return (share.share / weight, value / weight) if weight and rows else (0.0, 0.0)

    def _step(self) -> None:
        """Of the optimizer, by sums of gradients over the data ranks."""
        sync = self._sums.now
        sync.begin()
        sync.finish()
        self.noted()
        self._sums.optimizer.step()
