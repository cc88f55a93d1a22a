"""An accumulation: the backward calls between two updates, and the global mean loss of them all.

    loss  =  sum over all ranks and calls of S  /  sum over all ranks and calls of W

S and W are the sum and the weight of the loss over a micro-batch: rows times their mean, and rows,
where the loss gives a mean. W is not known before the last call, so gradients are scaled for the
weight that is likely (`_unit`), and once more at the end where it is another one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.model import Model
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.program import Program, RankOutputs
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.export import refuse_metrics
from synchromesh.training.execution import Execution
from synchromesh.values.schedule import INTERLEAVED


class Accumulation:
    """What the backward calls since the last update add up to."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self._world = execution, execution.world
        self.begun = False  # there was a backward call since the last update
        self.summed = False  # the last backward has summed the gradients over the ranks
        self._unit = 0.0  # global weight for which a gradient is not scaled
        self._rows = 0  # global rows of the first backward call
        self._programs_run = 0
        # ([loss sum, weight, whether it is a pair, whether it cannot be added up, whether it has
        # a gradient], work under way)
        self._totals: list[tuple[Tensor, Any]] = []

    def require_none(self, what: str) -> None:
        """ValueError where `what` is to happen although gradients wait for their update."""
        if self.begun:
            raise ValueError(
                f"{what} in the middle of an accumulation ({len(self._totals)} backward "
                "calls since the last update) would lose its gradients: call update first"
            )

    def require_last(self, what: str) -> None:
        """ValueError where `what` is to happen before the last backward call."""
        if not self.summed:
            raise ValueError(
                f"{what} needs the whole gradient, which is summed over the ranks by the last "
                f"backward of an accumulation ({len(self._totals)} backward calls so far, "
                "none of them the last): call backward(batch) before"
            )

    def add(
        self, batch: Any, rows: GlobalRows, last: bool, micro_batches: int, steps: int
    ) -> Tensor:
        """Forward and backward of this rank's rows; returns the loss of the accumulation so far.

        steps: updates done, from which random operators draw. ValueError where rows that depend on
        each other would come into several micro-batches.
        """
        execution, start = self._execution, 0
        step = execution.active.step
        if micro_batches > 1 and step.coupling:
            raise ValueError(
                f"micro_batches={micro_batches} would part rows that depend on each other "
                f"({step.coupled}) and train another loss: leave it out, or give smaller batches"
            )
        micro = [part for part in rows.micro(micro_batches) if part.total]  # no rank runs none
        with execution.streams.preserved():
            for part in micro:
                count = execution.active.local_rows(part)
                local = batch if micro_batches == 1 else take(batch, start, start + count)
                start += count
                if last and part is micro[-1]:
                    execution.sync.begin()
                execution.unsettled_rows += count
                alone = last and len(micro) == 1 and not self.begun
                self._rows = self._rows or rows.total
                self._forward_backward(local, part, alone, steps)
        value = self._loss()
        if last:
            if not any(float(total[4]) for total, _ in self._totals):
                raise ValueError(
                    "the loss depends on no parameter that is trained, so that a step would "
                    "change none of them: it is detached, a whole number or computed under "
                    "torch.no_grad, or all parameters are frozen"
                )
            weight = float(sum(total[1] for total, _ in self._totals))
            if not weight:
                raise ValueError(
                    "the loss's weight is 0 over all ranks (nothing in the batch counts), so its "
                    "mean is not defined: leave such a batch out"
                )
            execution.sync.finish(None if weight == self._unit else self._unit / weight)
            self.summed = True
        return value

    def _forward_backward(self, batch: Any, rows: GlobalRows, alone: bool, steps: int) -> None:
        """One micro-batch: adds to gradients and to the loss. alone: it is the only one of its
        accumulation."""
        execution = self._execution
        filled = execution.filled(batch, rows)
        program = execution.program(filled, execution.loss, rows)
        sums = torch.zeros(5, dtype=torch.float64, device=self._world.device)
        results: list[RankOutputs] = []
        if program is not None:
            parts = self._overlapped(program, batch, filled, rows)
            results = program.run(parts, steps, self._programs_run)
        for result in results:
            refuse_metrics(result.names)
            weighted = len(result.outputs) == 2
            if not self._unit:
                targets = 0 if program is None else program.targets
                self._unit = _unit(weighted, targets, self._rows)
            if result.rows and result.leads:
                value = result.outputs[0].detach()
                sums[0] += value if weighted else value * result.rows
                sums[1] += result.outputs[1].detach() if weighted else result.rows
                sums[2] = weighted
            sums[4] += any(value.requires_grad for value in result.outputs)
            sums[3] = weighted and result.outputs[1].requires_grad and not alone
        work = self._world.everyone.all_reduce(sums, asynchronous=True, counted=False)
        self._totals.append((sums, work))
        self._programs_run += INTERLEAVED
        self.begun = True
        if program is not None:
            with program.backward():
                self._backward(results)
            program.after_backward(bool(results))

    def _backward(self, results: Sequence[RankOutputs]) -> None:
        """Backward of the outputs, each with its share of the global loss.

        L = S / W       dL = (dS - L dW) / W        W: where it depends on parameters
        """
        values, seeds = list[Tensor](), list[Tensor]()
        for result in results:
            weighted = len(result.outputs) == 2
            weight = (1.0 if weighted else result.rows) / self._unit if result.rows else 0.0
            values.append(result.outputs[0])
            seeds.append(torch.full_like(values[-1], weight))
            if weighted and result.outputs[1].requires_grad:
                loss = self._loss()
                values.append(result.outputs[1])
                seeds.append((-loss * weight).to(values[-1].dtype))
        live = [(v, s) for v, s in zip(values, seeds, strict=True) if v.requires_grad]
        if live:
            torch.autograd.backward([v for v, _ in live], [s for _, s in live])

    def _overlapped(
        self, program: Program | OpaqueProgram, batch: Any, filled: Any, rows: GlobalRows
    ) -> list[tuple[Any, GlobalRows]]:
        """The batch, in one part or cut so that computation and traffic overlap."""
        count = self._execution.interleaving.micro_batches(
            0 if program.coupled else min(rows.counts)
        )
        if count == 1:
            return [(filled, rows)]
        parts, start = [], 0
        for part in rows.micro(count):
            stop = start + self._execution.active.local_rows(part)
            parts.append((take(batch, start, stop), part))
            start = stop
        return parts

    def _loss(self) -> Tensor:
        """The global mean loss of the accumulation; waits for the small all-reduces."""
        for index, (total, work) in enumerate(self._totals):
            if work is not None:
                self._world.wait(work)
                self._totals[index] = (total, None)
        value = torch.stack([total for total, _ in self._totals]).sum(0)
        if value[3]:
            raise ValueError(
                "the loss's weight depends on parameters, and its gradient needs the loss of all "
                "rows before any backward: give such a batch at once (no micro-batches, no "
                "accumulation), or detach the weight"
            )
        if not self._unit:  # of a rank that ran nothing
            self._unit = _unit(bool(value[2]), 0, self._rows)
        return value[0] / value[1]


def _unit(weighted: bool, targets: int, rows: int) -> float:
    """The global weight for which a gradient is not scaled: the one that is likely."""
    if weighted:
        return float(rows * targets) if targets else 1.0
    return float(rows)


def forget_gradients(model: Model) -> None:
    """Lets go of the gradients of the last step: when the next one begins, not when it ends.

    At the end of a step they lie on top of the heap, and glibc hands them back to the system
    and gets them anew, page by page, in every step: 7 % of ResNet-18's time on one CPU rank.
    """
    for parameter in model.parameters.values():
        parameter.grad = None
