"""An accumulation: the backward calls between two updates, and the global mean loss of them all.

    loss  =  sum over all ranks and calls of S  /  sum over all ranks and calls of W

S and W are the sum and the weight of the loss over a micro-batch: rows times their mean, and rows,
where the loss gives a mean. W is not known before the last call, so gradients are scaled for the
weight that is likely (`_unit`), and once more at the end where it is another one.

Where calls have shares, each is such an accumulation, whose gradient is added to the sum:

    loss  =  sum over calls of share * S / W"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from synchromesh.engine import control_channel
from synchromesh.engine.agreement import LossSum
from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.optimizer import clip_norm
from synchromesh.engine.pipeline import MicroBatch, PipelineWalk, Seeds, WeightCalls
from synchromesh.engine.program import RankOutputs
from synchromesh.programs.communicator import Finish
from synchromesh.trace.capture.outputs import refuse_metrics
from synchromesh.training import learning_rate
from synchromesh.training.active_plan import refuse_parts
from synchromesh.training.execution import Execution
from synchromesh.training.filled_pipeline import FilledPipeline
from synchromesh.training.loss_sums import add_loss, refuse_sums
from synchromesh.training.reports import add_reports
from synchromesh.values.schedule import PIECES, Action


class BackwardCall(NamedTuple):
    """How a backward call runs.

    micro_batches: 1, or into how many the rows are cut here, where the plan has none. loss: whose
    turn it is. share: of its mean in the loss of the accumulation; None: that is one mean over all
    calls."""

    last: bool
    micro_batches: int = 1
    loss: str | None = None
    share: float | None = None


class Accumulation:
    """What the backward calls since the last update add up to."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self._world = execution, execution.world
        self._early = execution.early
        self.calls = 0  # of backward since the last update
        self.summed = False  # the last backward has summed the gradients over the ranks
        self._unit = 0.0  # global weight for which a gradient is not scaled
        self._rows = 0  # global rows of the first backward call
        self.rows = 0  # ... and of all
        self._programs_run = 0
        # (those of `LossSum`, what waits for those of all ranks)
        self._totals: list[tuple[Tensor, Finish | None]] = []
        self._sums: list[float] = []  # of these
        self._own: list[Tensor] = []  # the same of this rank's worker, where it trains alone
        self._own_weight = 0.0
        self._share: float | None = None  # of the first call
        self._shares: dict[nn.Parameter, Tensor] = {}  # gradients of calls before, by their shares
        self._value: Tensor | float = 0.0  # the same of their losses
        self._changed = 0  # how often gradients were in place, until backward or clip was done

    def require_none(self, what: str) -> None:
        if self.calls:
            raise ValueError(
                f"{what} in the middle of an accumulation (backward calls since "
                f"the last update: {self.calls}) would lose its gradients: call update first"
            )

    def take_turn(self, loss: str | None) -> None:
        """What follows is of this loss. ValueError in the middle of another one's accumulation."""
        losses = self._execution.losses
        before = losses.now
        losses.take(loss)
        if losses.now is not before and self.calls:
            losses.now = before
            self.require_none(f"backward of the loss {loss!r}")

    def require_open(self) -> None:
        if self.summed:
            raise ValueError(
                "backward after the last one of an accumulation: its gradients are summed over "
                "the ranks already; call update first, or give last=False to all but the last"
            )

    def require_rows(self, rows: GlobalRows) -> None:
        if rows.total == 0 and not rows.apart:
            raise ValueError(
                "a step needs at least one row, but every rank's batch is empty (0 rows)"
            )

    def require_last(self, what: str) -> None:
        if not self.summed:
            raise ValueError(
                f"{what} needs the whole gradient, which is summed over the ranks by the last "
                f"backward of an accumulation (backward calls so far: {self.calls}, "
                "none of them the last): call backward(batch) before"
            )

    def clip(self, max_norm: float) -> Tensor:
        """As of the trainer."""
        self.require_last("clip")
        if self._execution.workers.filled:
            raise ValueError(
                f"@schedule={self._execution.active.plan.schedule} steps by the gradients of each "
                "update within backward, which are gone by now: leave clip out, or write "
                "@schedule=1f1b"
            )
        group = self._execution.workers.group(self._world.everyone)
        norm = clip_norm(self._execution.workers.copies(), group, max_norm)
        self._changed = self._changes()
        return norm

    def warn_of_parts(self, steps: int) -> None:
        """Of gradients that were changed since the last backward where each rank has parts of
        them; looked for in two of 64 steps."""
        if steps % 64 >= 2 or self._changes() == self._changed or self._execution.model.complete():
            return
        self._execution.notices.once(
            "gradients were changed between backward and update, and this plan cuts them over "
            "ranks: a norm that is taken of them, as by clip_grad_norm_, is one rank's. Call "
            "trainer.clip(max_norm); what changes each entry by itself is right"
        )

    def update(self, scheduler: Any) -> None:
        """The optimizer's step, and the scheduler's."""
        self._execution.workers.step(self._execution.losses.now.optimizer)
        if scheduler is not None:
            learning_rate.advance(scheduler, self.rows)

    def _changes(self) -> int:
        gradients = (p.grad for p in self._execution.workers.leaves.values())
        return sum(g._version for g in gradients if g is not None)

    def add(self, batch: Any, rows: GlobalRows, call: BackwardCall, steps: int) -> Tensor:
        """Forward and backward of this rank's rows; returns the loss of the accumulation so far.

        steps: updates done, from which random operators draw. ValueError where rows that depend on
        each other would come into several micro-batches."""
        if first := not self.calls:
            self._share = call.share
            if call.share is None:  # else it is no mean over all rows
                self._execution.noise.begin(steps)
        if (call.share is None) != (self._share is None):
            raise ValueError("give share= to all backward calls of an accumulation, or to none")
        if call.share is not None and self._execution.active.plan.sync.late:
            raise ValueError(
                "share= sums gradients at every call, and under this plan sums come steps late: "
                "leave share= or @synchronisation=stale out"
            )
        if filled := self._execution.workers.filled:
            return self._into(filled, batch, rows, call, steps)
        execution, ends = self._execution, call.last or call.share is not None
        parts = self._parts(rows, call.micro_batches)
        batch = execution.carry.joined(batch, rows, execution.active)
        micro = execution.micro_batches(batch, parts)
        alone = ends and len(parts) == 1 and not self._totals
        with execution.others_frozen(), execution.streams.preserved():
            self._rows = self._rows or rows.total
            self.rows += rows.total
            if ends:
                execution.sync.begin()
            execution.noise.count(parts)
            execution.workers.rows += sum(execution.active.local_rows(p) for p in parts)
            execution.carry.advance(self._walk(micro, alone, ends, steps))
            self.calls += 1
        value = self._loss()
        self._report(rows.total, first)
        if ends:
            self._end()
            self.summed = call.last
        value = value if call.share is None else self._shared(value, call.share)
        if self.summed and steps % 64 < 2:
            self._changed = self._changes()
        return value

    def _into(
        self, filled: FilledPipeline, batch: Any, rows: GlobalRows, call: BackwardCall, steps: int
    ) -> Tensor:
        """The same of a pipeline without a flush, whose optimizer steps while it runs."""
        if not call.last or call.share is not None:
            raise ValueError(
                f"@schedule={self._execution.active.plan.schedule} steps within backward, so that "
                "no call adds to another's gradients: leave last= and share= out, or write "
                "@schedule=1f1b"
            )
        execution, parts = self._execution, self._parts(rows, call.micro_batches)
        micro = execution.micro_batches(batch, parts)
        execution.workers.rows += sum(execution.active.local_rows(p) for p in parts)
        self.calls, self.rows, self.summed = 1, rows.total, True
        with execution.streams.preserved():
            return filled.run(micro, steps, execution.programs.reports, execution.reports)

    def _end(self) -> None:
        """Gradients are summed over the ranks. ValueError where there are none, or no weight."""
        if not self.rows:  # of a worker that goes on without the others, who may have some
            return self._execution.sync.abandon()
        refuse_sums(self._sums)
        weight = self._sums[LossSum.WEIGHT]
        if alone := self._execution.workers.alone:
            weight = self._own_weight
        scale = None if weight in (0.0, self._unit) else self._unit / weight
        execution = self._execution
        ahead = execution.workers.stepping(
            execution.losses.now.optimizer, execution.sharding.fetch
        )
        execution.sync.finish(scale, ahead if self._share is None else None)
        if alone and not weight:  # a worker without rows makes no step
            self._execution.workers.forget_gradients()
        self._execution.noise.finish(scale or 1.0)

    def _shared(self, value: Tensor, share: float) -> Tensor:
        """Adds this call's gradients to those of the calls before; returns the loss so far."""
        for p in self._execution.workers.leaves.values():
            if p.grad is not None:
                before = self._shares.get(p)
                own = share * p.grad if before is None else before.add_(p.grad, alpha=share)
                self._shares[p] = own
        total = self._value = share * value + self._value
        self._execution.workers.forget_gradients()
        if self.summed:
            for p, gradient in self._shares.items():
                p.grad = gradient
        else:
            self._totals, self._own, self._rows, self._unit = [], [], 0, 0.0
        return total

    def _report(self, rows: int, first: bool) -> None:
        of, known = self._execution.programs.reports, self._execution.reports
        if of or known:
            with self._early.reading():
                latest = self._totals[-1][0][len(LossSum) :].tolist()
            known.add(of, latest, rows, first)

    def _parts(self, rows: GlobalRows, by_hand: int) -> list[GlobalRows]:
        step, plan = self._execution.active.step, self._execution.active.plan
        count = max(by_hand, plan.micro_batches)
        if by_hand > 1 and (plan.micro_batches > 1 or plan.stage_count > 1):
            raise ValueError(
                f"micro_batches={by_hand}: this plan says itself into how many parts batches are "
                f"cut ({plan.micro_batches}): leave this out, or write "
                f"@micro_batches={by_hand} into the plan"
            )
        refuse_parts(step, count)
        if count > 1:
            self._execution.notices.doubt(step)
        parts = rows.micro(by_hand) if by_hand > 1 else rows.micro_batches()
        return [part for part in parts if part.total]

    def _walk(
        self, micro: Sequence[MicroBatch], alone: bool, last: bool, steps: int
    ) -> dict[str, Tensor]:
        """Adds to gradients and loss; this rank's carry. alone: these are the accumulation."""
        reports = self._execution.programs.reports
        count = len(LossSum) + 2 * len(reports)
        sums = torch.zeros(count, dtype=torch.float64, device=self._world.device)
        if not micro:
            self._send(sums)
            return {}
        execution, active = self._execution, self._execution.active
        walk = PipelineWalk(micro, active.groups, steps, self._programs_run, apart=PIECES)
        complete = walk.last_backwards(active.plan.schedule)
        # ranks of other stages may need this one's backwards first
        late = self._world.blocking and len(micro) > 1

        def forwarded(results: Sequence[RankOutputs]) -> None:
            for result in results:
                self._add(result, sums, alone)
                if result.reports:
                    add_reports(reports, result, sums[len(LossSum) :])

        def forwards_over() -> None:
            if not late:
                self._send(sums)

        def before_weights(action: Action) -> None:
            execution.noise.block(micro[action.micro_batch].rows)
            if last:
                leaves = execution.workers.leaves
                execution.sync.complete([leaves[n] for n in complete.get(action, ())])

        walk.train(
            active.plan.schedule, forwarded, forwards_over,
            lambda _, results: self._seeds(results, alone),
            WeightCalls(before_weights, execution.sync.end_backward), goes_on=not last,
        )  # fmt: skip
        if late:
            self._send(sums)
        self._programs_run += PIECES * len(micro)
        return walk.carry()

    def _add(self, result: RankOutputs, sums: Tensor, alone: bool) -> None:
        refuse_metrics(result.names)
        if not result.outputs:
            return
        weighted = len(result.outputs) == 2
        if not self._unit:
            self._unit = _unit(weighted, self._execution.active.step.targets, self._rows)
        add_loss(result, sums)
        alone = alone and not self._execution.workers.alone
        if weighted and result.outputs[1].requires_grad and not alone:
            sums[LossSum.COUPLED].fill_(1)

    def _send(self, sums: Tensor) -> None:
        active, workers = self._execution.active, self._execution.workers
        everyone, alone = workers.loss_group(self._world.everyone), workers.alone
        total = sums if everyone.size == 1 else active.agree_step.exchanged(_of_loss(sums))
        if total is not None and len(total) == len(sums):
            self._totals.append((total, None))
            self._own.append(total)
        elif not alone and active.plan.stage_count == 1 and self._execution.sharding.served:
            self._totals.append((sums, control_channel.start_all_gather(everyone, sums)))
        else:  # where the first rank's backward may wait for what this one does after its own
            table = workers.by_worker(sums) if alone else sums[None]
            work = everyone.all_reduce(table, asynchronous=True, counted=False)

            def summed() -> Tensor:
                self._world.wait(work)
                self._own.append(table[workers.index if alone else 0])
                return table

            self._totals.append((sums, summed))
        self._early.mark()

    def _seeds(self, results: Sequence[RankOutputs], alone: bool) -> Seeds:
        """Outputs, each with its share of the gradient of the global loss.

        L = S / W       dL = (dS - L dW) / W        W: where it depends on parameters"""
        seeds: Seeds = []
        for result in results:
            if not result.outputs:
                continue
            weighted = len(result.outputs) == 2
            weight = (1.0 if weighted else result.rows) / self._unit if result.rows else 0.0
            value = result.outputs[0]
            seeds.append((value, torch.full_like(value, weight)))
            alone = alone and not self._execution.workers.alone  # who would divide by others' W
            if weighted and result.outputs[1].requires_grad and alone:
                of = result.outputs[1]
                seeds.append((of, (-self._loss() * weight).to(of.dtype)))
        return seeds

    def _loss(self) -> Tensor:
        """The global mean loss of the accumulation; waits for the small all-reduces."""
        with self._early.reading():
            for index, (_, finish) in enumerate(self._totals):
                if finish is not None:
                    self._totals[index] = (finish().sum(0), None)
            value = _of_loss(self._totals[0][0])
            for total, _ in self._totals[1:]:
                value = value + _of_loss(total)
            self._sums = value.tolist()
            if self._execution.workers.alone:
                self._own_weight = sum(float(sums[LossSum.WEIGHT]) for sums in self._own)
            loss = value[LossSum.VALUE] / value[LossSum.WEIGHT]
        if self._sums[LossSum.COUPLED]:
            raise ValueError(
                "the loss's weight depends on parameters, and its gradient needs the loss of all "
                "rows before any backward: give such a batch at once (no micro-batches, no "
                "accumulation, no workers that train alone), or detach the weight"
            )
        if not self._unit:  # of a rank without outputs
            targets = self._execution.active.step.targets
            self._unit = _unit(bool(self._sums[LossSum.PAIR]), targets, self._rows)
        return self._early.handed(loss)


def _of_loss(sums: Tensor) -> Tensor:
    """Of all sums those of `LossSum`; what is reported is behind them."""
    return sums if len(sums) == len(LossSum) else sums[: len(LossSum)]


def _unit(weighted: bool, targets: int, rows: int) -> float:
    """The global weight for which a gradient is not scaled: the one that is likely."""
    if weighted:
        return float(rows * targets) if targets else 1.0
    return float(rows)
