"""A pipeline: the instructions of a schedule, walked with tensors by one rank.

    0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...        (values/messages.py has their order)

What a forward of a micro-batch leaves stays until its backward (`ForwardResult`), and of that
what the gradients of weights need until these, where the schedule has them later. Values
that arrive are leaves of the stage's autograd graph: their gradients are sent back, and added up
where several stages have read the value. One stage is a pipeline without messages: its schedule
is gradient accumulation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from synchromesh.engine.batches import GlobalRows
from synchromesh.engine.crossing import Receipt, deliver, send
from synchromesh.engine.groups import Posted
from synchromesh.engine.opaque import OpaqueProgram
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.program import ForwardResult, Program, RankOutputs, share
from synchromesh.engine.sharding import Sharding
from synchromesh.programs.divided_backward import DividedBackward
from synchromesh.values.buckets import completing
from synchromesh.values.exchange import Border
from synchromesh.values.messages import Instruction, Message, Receive, Run, Send, instructions
from synchromesh.values.schedule import Action, Schedule, forward_only, pipeline

Seeds = list[tuple[Tensor, Tensor]]  # outputs, each with its gradient


@dataclass(frozen=True)
class MicroBatch:
    """What this rank runs of a micro-batch: its rows, or parts of them that take turns."""

    program: Program | OpaqueProgram
    rows: GlobalRows
    parts: Sequence[tuple[Any, GlobalRows]]


@dataclass(frozen=True)
class WeightCalls:
    """What is called before and after an action that makes gradients of parameters, the former
    with the action, the latter with its stage."""

    before: Callable[[Action], None] = lambda _: None
    after: Callable[[int], None] = lambda _: None


class PipelineWalk:
    """A walk over micro-batches; `forward` runs one without backwards, `train` a whole one.

    step, first: name the draws of random operators; micro-batch i draws as first + i * apart."""

    def __init__(
        self, micro_batches: Sequence[MicroBatch], groups: PlanGroups, step: int, first: int,
        apart: int,
    ) -> None:  # fmt: skip
        self.micro_batches, self.groups = dict(enumerate(micro_batches)), groups
        self.step, self.first, self.apart = step, first, apart
        self._forwards: dict[tuple[int, int], ForwardResult] = {}  # by stage and micro-batch
        self._handed: dict[tuple[int, int, int], Mapping[Border, Tensor]] = {}  # on these ranks
        self._gradients: dict[tuple[int, int], list[tuple[Border, Tensor]]] = {}
        self._over: list[tuple[int, int]] = []  # done but for what departs
        self._left: dict[tuple[int, int], DividedBackward] = {}  # for gradients of weights
        self._divides = False
        self._sent: dict[Message, Posted] = {}
        self._receipts: dict[Message, Receipt] = {}
        # what each part of each micro-batch made of the carry
        self._carry = {
            i: [dict[str, Tensor]() for _ in m.parts] for i, m in enumerate(micro_batches)
        }

    @property
    def program(self) -> Program | OpaqueProgram:
        """That of the first micro-batch."""
        return next(iter(self.micro_batches.values())).program

    @property
    def sharding(self) -> Sharding:
        """Of all programs of a plan."""
        return self.program.sharding

    def forward(self) -> list[RankOutputs]:
        """The outputs of all micro-batches that are this rank's."""
        results: list[RankOutputs] = []
        schedule = forward_only(self.program.of, len(self.micro_batches))
        instructions = self._instructions(schedule)
        self._expect(instructions, goes_on=False)
        for instruction in instructions:
            if isinstance(instruction, Run):
                results += self._run_forward(instruction.action).results
                self._finish(instruction.action)  # nothing goes back
            else:
                self._communicate(instruction)
        self._end()
        return results

    def train(
        self,
        name: str,
        forwarded: Callable[[Sequence[RankOutputs]], None],
        forwards_over: Callable[[], None],
        backwards: Callable[[Action, Sequence[RankOutputs]], Seeds],
        weights: WeightCalls = WeightCalls(),
        goes_on: bool = False,
    ) -> None:
        """Forwards and backwards in the order of the schedule `name`. goes_on: whether others
        follow before parameters change.

        forwarded: is called after each forward with its outputs. forwards_over: once, when this
        rank has no forward left, and what its last one made departs. backwards: before each
        backward, and gives the gradients of its outputs. weights: around what makes the gradients
        of parameters, a backward or the later part of it."""
        schedule = pipeline(name, self.program.of, len(self.micro_batches))
        self._divides = schedule.divides
        walked = self._instructions(schedule)
        runs = [i.action for i in walked if isinstance(i, Run)]
        last = max(i for i, a in enumerate(runs) if a.kind == "F")
        self._expect(walked, goes_on)
        for instruction in walked:
            if not isinstance(instruction, Run):
                self._communicate(instruction)
                continue
            action = instruction.action
            if action == runs[last + 1]:
                forwards_over()
            if action.kind == "F":
                forwarded(self._run_forward(action).results)
            else:
                self._run_back(action, backwards, weights)
        self._end()

    def last_backwards(self, name: str) -> dict[Action, list[str]]:
        """Of the schedule `name`: the backwards after which gradients of parameters are complete
        on this rank, with the parameters' names."""
        program, key = self.program, (name, len(self.micro_batches))
        if key not in program.completing:
            actions = pipeline(name, program.of, len(self.micro_batches)).groups[program.group]
            program.completing[key] = {
                action: [n for names in by_component.values() for n in names]
                for action, by_component in completing(actions, program.first_users).items()
            }
        return program.completing[key]

    def _instructions(self, schedule: Schedule) -> tuple[Instruction, ...]:
        its = self.micro_batches.values()
        pairs = frozenset(p for m in its for p in m.program.crossings)
        walked: tuple[Instruction, ...] = instructions(schedule, pairs)[self.program.group]
        return walked

    def _expect(self, instructions: Sequence[Instruction], goes_on: bool) -> None:
        """Tells which parameters will be needed, in which order."""
        actions = [i.action for i in instructions if isinstance(i, Run)]
        programs = [self.micro_batches[a.micro_batch].program for a in actions]
        runs = [(a, program.gathered(a)) for a, program in zip(actions, programs, strict=True)]
        self.sharding.expect(runs, goes_on)

    def _forget(self) -> None:
        while self._over:
            del self._forwards[self._over.pop()]

    def _end(self) -> None:
        for posted in self._sent.values():
            posted.wait()
        self._sent.clear()
        self.sharding.over()

    def carry(self) -> dict[str, Tensor]:
        """The carry of this rank's rows for the next batch, when all has been walked: the leaves
        that it reads, by name. All ranks of the plan call alike."""
        parts: dict[str, list[Tensor]] = {}
        for i, batch in self.micro_batches.items():
            program, of_parts = batch.program, self._carry[i]
            for (_, rows), made in zip(batch.parts, of_parts, strict=True):
                own, _ = share(program.leaf_layout, program.position, rows)
                leaves = made
                if program.deliveries:
                    leaves = deliver(made, program.deliveries, rows, self.groups)
                for name, x in leaves.items():
                    parts.setdefault(name, []).append(x[:own])  # not of a stand-in row
        return {name: torch.cat(leaf) for name, leaf in parts.items()}  # on memory of its own

    # Runs

    def _run_forward(self, action: Action) -> ForwardResult:
        self._forget()
        self.sharding.begin(action)
        stage, m = action.stage, action.micro_batch
        batch, arrived = self.micro_batches[m], dict[Border, Tensor]()
        for (source, target), items in batch.program.crossings.items():
            if target != stage:
                continue
            if items[0].crosses:
                receipt = self._receipts.pop(Message("F", source, target, m))
                values: Mapping[Border, Tensor] = dict(receipt.wait())
            else:
                values = self._handed.pop((source, target, m))
            for item in items:
                border = item.read if item.crosses else item.made
                x = values[border].detach()
                arrived[border] = x.requires_grad_(item.flows and torch.is_grad_enabled())
        first = self.first + m * self.apart
        of = self._place(m)
        forward = batch.program.run(
            batch.parts, self.step, first, stage, arrived, of, self._divides
        )
        for (source, target), items in batch.program.crossings.items():
            if source == stage and not items[0].crosses:
                self._handed[source, target, m] = {i.made: forward.made[i.made] for i in items}
        self._forwards[stage, m] = forward
        for made, result in zip(self._carry.get(m, ()), forward.results, strict=False):
            made.update(result.carry)
        return forward

    def _place(self, m: int) -> tuple[int, int]:
        """Which of how many micro-batches of a step a program runs."""
        return m, len(self.micro_batches)

    def _run_back(
        self, action: Action, backwards: Callable[[Action, Sequence[RankOutputs]], Seeds],
        weights: WeightCalls,
    ) -> None:  # fmt: skip
        """A backward, or a part of one."""
        if action.kind == "B" and self._divides:
            self._run_backward(action, backwards)
            return
        weights.before(action)
        if action.kind == "W":
            self._run_weights(action)
        else:
            self._run_backward(action, backwards)
        weights.after(action.stage)

    def _run_backward(
        self, action: Action, backwards: Callable[[Action, Sequence[RankOutputs]], Seeds]
    ) -> None:
        self._forget()
        self.sharding.begin(action)
        stage, m = action.stage, action.micro_batch
        program, forward = self.micro_batches[m].program, self._forwards[stage, m]
        seeds = backwards(action, forward.results)
        arrived = self._gradients.pop((stage, m), []) + self._received(program, stage, m)
        seeds += [(forward.made[border], gradient) for border, gradient in arrived]
        live = [(x, gradient) for x, gradient in seeds if x.requires_grad]
        with program.backward():
            if live:
                torch.autograd.backward([x for x, _ in live], [g for _, g in live])
        program.after_backward(bool(forward.results))
        for (source, target), items in program.crossings.items():
            if target == stage and not items[0].crosses:
                back = [(i.made, _gradient(forward.arrived[i.made])) for i in items if i.flows]
                self._gradients.setdefault((source, m), []).extend(back)
        if forward.divided is not None:
            self._left[stage, m] = forward.divided
        forward.results, forward.made = [], {}
        self._finish(action)

    def _run_weights(self, action: Action) -> None:
        self._forget()
        self._left.pop((action.stage, action.micro_batch)).weights()

    def _received(
        self, program: Program | OpaqueProgram, stage: int, m: int
    ) -> list[tuple[Border, Tensor]]:
        """The gradients that other ranks send back to a stage."""
        arrived: list[tuple[Border, Tensor]] = []
        for (source, target), items in program.crossings.items():
            if source == stage and items[0].crosses:
                arrived += self._receipts.pop(Message("B", source, target, m)).wait()
                if any(item.flows for item in items):  # it came back, so it has arrived there
                    self._sent.pop(Message("F", source, target, m)).wait()
        return arrived

    def _finish(self, action: Action) -> None:
        """The micro-batch is done here but for what is sent of it, before the next run."""
        at = action.stage, action.micro_batch
        self.micro_batches[action.micro_batch].program.end(self._forwards[at])
        self._over.append(at)

    # Messages

    def _communicate(self, instruction: Send | Receive) -> None:
        message = instruction.message
        batch, backward = self.micro_batches[message.micro_batch], message.kind == "B"
        items = batch.program.crossings.get((message.source, message.target), ())
        rows = batch.rows.ranges
        if isinstance(instruction, Receive):
            self._receipts[message] = Receipt(items, backward, rows, self.groups)
            return
        forward = self._forwards[message.sender, message.micro_batch]
        tensors = forward.made
        if backward:
            tensors = {b: _gradient(x) for b, x in forward.arrived.items() if x.requires_grad}
        self._sent[message] = send(items, tensors, backward, rows, self.groups)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
