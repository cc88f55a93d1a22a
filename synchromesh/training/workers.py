"""What data ranks have of their own, and how it becomes equal: buffers that are computed from rows
(running statistics of batch norm, unless these are synchronised, and others), as means weighted by
the rows of each rank; and workers that train alone, `@synchronisation=local:H`.

A worker is a data index of the plan; its tensor ranks train as one. (Stich 2019, "Local SGD
Converges Fast and Communicates Little", ICLR, algorithm 1.)

    p_i  <-  1/N sum_j p_j    parameters: after every H steps, and before one model is asked for
    s_i  <-  1/N sum_j s_j    optimizer states: before a switch or checkpoint, which know one alone

Counters of an optimizer are the first worker's: one without rows has made a step less. Under
`diloco:H` the mean is no end but a direction (`OuterStep`)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.checkpoint.local_tensor import LocalTensor
from synchromesh.checkpoint.model_state import ModelState
from synchromesh.engine.asynchronous import Seen, Worker
from synchromesh.engine.early_step import EarlySteps
from synchromesh.engine.gradients import Ahead
from synchromesh.engine.groups import Group
from synchromesh.engine.opaque import broadcast_state
from synchromesh.engine.plan_groups import PlanGroups
from synchromesh.engine.replica import Replica
from synchromesh.engine.shared_memory import SharedMemory
from synchromesh.engine.update_server import ServedRecord
from synchromesh.training.active_plan import ActivePlan
from synchromesh.training.filled_pipeline import FilledPipeline
from synchromesh.training.outer_step import OuterStep
from synchromesh.values.fields import to_plain
from synchromesh.values.holding import Holding, averaged
from synchromesh.values.plan import Plan
from synchromesh.values.staleness import Staleness


class Workers:
    """Of the plan in force. All ranks call alike, idle ones too."""

    def __init__(self, state: ModelState, sync_batch_norm: bool, by_age: bool) -> None:
        """by_age: whether servers divide learning rates by a gradient's age."""
        self.early = EarlySteps()  # and what is stepped is fetched for the next step
        self.every = 0  # steps from one mean of parameters to the next; 0: none
        self.alone = False  # a worker steps by its own gradient
        self.flush: Callable[[], None] = lambda: None  # takes sums that come late
        self.filled: FilledPipeline | None = None  # makes the optimizer's steps in backward
        self._served_by = 0  # servers
        self._sums_served = False  # by servers, who step by them
        self._past: list[ServedRecord] = []  # of plans before
        self.served: Worker | None = None  # exchanges with servers in time of its own
        self.asynchronous = False  # all have such a one, but for idle ranks
        self.whole: dict[str, nn.Parameter] = {}  # what it computes with, which servers keep
        self.leaves: dict[str, nn.Parameter] = {}  # what backward makes gradients of
        self.rows = 0  # computed with on this rank since `settle` was called
        self._state, self._sync_batch_norm, self._by_age = state, sync_batch_norm, by_age
        state.settle = lambda: self.take_means(states=True)
        self._means: list[tuple[Group, list[str]]] = []  # parameters of one all-reduce each
        self._groups: PlanGroups | None = None
        self._apart = self._states_apart = False
        self._held: Mapping[str, Holding] = {}
        self._ranks: tuple[int, ...] = ()
        self._trained: list[str] = []  # parameters that this rank steps by its worker's gradient
        self._outer: OuterStep | None = None
        self._in_common: list[str] = []  # parameters that others write too

    def adopt(
        self, plan: Plan, held: Mapping[str, Holding], groups: PlanGroups
    ) -> dict[str, nn.Parameter]:
        """Another plan is in force; what this rank computes with of what servers keep."""
        self.every, self._means, position = plan.sync.steps, [], groups.position
        self._forget_parts()
        self.alone, self.asynchronous = plan.sync.alone, plan.sync.asynchronous
        if (control := self._state.world.control) is not None:
            control.wait_apart(self.asynchronous)
        self._served_by = plan.sync.servers * self.asynchronous
        self._sums_served = plan.sync.word == "server"
        self._groups = groups if self.alone else None
        self._trained = [n for n, h in held.items() if h.alone and position in h.positions]
        for bucket in (b for b in averaged(held.values()) if position in b[0].positions):
            names = [h.tensor.name for h in bucket]
            self._means.append((groups.data_group(bucket[0].layout), names))
        self._serve(plan, held, groups)
        self._share(held, groups)
        momentum = self._staying(held, groups.ranks)
        self._held, self._ranks = held, groups.ranks
        self._restart(plan, momentum)
        return self.whole

    def _staying(self, held: Mapping[str, Holding], ranks: tuple[int, ...]) -> dict[str, Tensor]:
        """The momentum of an outer step, of what lies as before on the same ranks: else one that
        comes would have none."""
        known = {} if self._outer is None else self._outer.momentum
        stay = self._ranks == ranks
        return {n: x for n, x in known.items() if stay and self._held[n] == held[n]}

    def _serve(self, plan: Plan, held: Mapping[str, Holding], groups: PlanGroups) -> None:
        """What this rank computes with of what servers keep."""
        if self.served is not None:
            self._past.append(self.served.record)
        self.whole, self.served = {}, None
        if self._served_by and groups.position is not None:
            replica = Replica(held, self._state.model.parameters, groups)
            self.served = Worker(plan.sync, replica, self._state.optimizer, groups.worker)
            if self.served.server is not None:
                self.served.server.by_age = self._by_age
            self.whole = replica.whole
            self.served.refresh()
        self.leaves = {**self._state.model.parameters, **self.whole}

    def _share(self, held: Mapping[str, Holding], groups: PlanGroups) -> None:
        """Parameters come to lie in one memory, or in one of this rank's own again."""
        model, common = self._state.model, [n for n in self._trained if held[n].in_common]
        self._unshare()
        by_group: dict[Group, dict[str, Tensor]] = {}
        for name in common:
            its = by_group.setdefault(groups.data_group(held[name].layout), {})
            its[name] = model.parameters[name].detach()
        for group, tensors in by_group.items():
            for name, x in SharedMemory(tensors, group).tensors.items():
                model.place(name, x)
        self._in_common = common

    def _unshare(self) -> None:
        model = self._state.model
        for name in self._in_common:
            model.place(name, model.parameters[name].detach().clone())
        if self._in_common:
            self._state.world.everyone.barrier()  # before anybody steps its own
        self._in_common = []

    def _restart(self, plan: Plan, momentum: Mapping[str, Tensor]) -> None:
        """The outer step begins where parameters are now. momentum: as far as it is known."""
        self._apart = self._states_apart = False
        parameters = {n: self._state.model.parameters[n] for n in self._trained}
        outer = OuterStep(parameters, momentum) if plan.sync.outer_step and parameters else None
        self._outer, self._state.outer = outer, [] if outer is None else outer.tensors

    def momentum(self, new: bool = False) -> dict[str, LocalTensor]:
        """Of the outer step, as a checkpoint has it. new: zeros that one is read to."""
        known = {} if self._outer is None else self._outer.momentum
        return {
            f"outer/{n}": self._state.local(f"outer/{n}", n, torch.zeros_like(x) if new else x)
            for n, x in known.items()
        }

    def resume(self, plan: Plan, read: Mapping[str, LocalTensor]) -> None:
        """Parameters have come from a checkpoint, and with them the momentum of the outer step."""
        parameters = self._state.model.parameters
        tensors = {n: read[key].tensor for n in self._trained if (key := f"outer/{n}") in read}
        self._restart(plan, {n: x.view(parameters[n].shape) for n, x in tensors.items()})
        if self.served is not None:
            self.served.restart()

    def forget_gradients(self) -> None:
        """Lets go of the gradients of the last step: when the next one begins, not when it ends.

        At the end of a step they lie on top of the heap, and glibc hands them back to the system
        and gets them anew, page by page, in every step: 7 % of ResNet-18's time on one CPU rank.
        """
        self.early.begin()
        for parameter in self.leaves.values():
            parameter.grad = None

    def follow(self, filled: FilledPipeline | None) -> None:
        """The plan in force has a pipeline without a flush, or has none."""
        self.filled = filled
        self._past += [filled.stash.record] if filled else []

    def _forget_parts(self) -> None:
        """Of gradients by which servers have stepped parts, which become other ones."""
        if self.served is not None:
            for parameter in self._state.model.parameters.values():
                parameter.grad = None

    def copies(self) -> list[tuple[nn.Parameter, float]]:
        """What has gradients, each with the number of ranks of `group` that have an equal one."""
        if not self.asynchronous:
            return self._state.copies()
        return [
            (p, 1.0 if self._held[n].placement.sharded else float(self._held[n].layout.tensor))
            for n, p in self.leaves.items()
        ]

    def step(self, optimizer: Optimizer) -> None:
        """Of the optimizer, or of the servers' by this worker's gradients."""
        if self.served is not None:
            self.served.update()
        elif self.filled is None:
            self.early.end(optimizer, self.leaves.values())

    def stepping(self, optimizer: Optimizer, fetch: Ahead) -> Ahead | None:
        """What steps by sums as they come (`EarlySteps.following`); None where all come first, as
        in an elastic run, whose ranks all complete a step or none does."""
        world = self._state.world
        possible = self._sums_served and world.device.type == "cpu" and world.member is None
        return self.early.following(optimizer, fetch) if possible else None

    def updated(self, steps: int) -> None:
        """Behind the optimizer's step. steps: done so far."""
        self._apart = self.every > 0
        self._states_apart = self._apart or bool(self._in_common)
        if self.every and steps % self.every == 0:
            self.take_means()

    def settle(self, active: ActivePlan, states: bool = False) -> None:
        """All that ranks have of their own becomes equal; optimizer states where asked for."""
        model = self._state.model
        names = model.never_synchronised if self._sync_batch_norm else model.statistics
        fed = [n for n in active.step.fed if n in model.buffers and n not in names]
        if self.alone:  # workers without rows have counted less
            fed += [n for n in model.buffers if n.endswith("num_batches_tracked") and n not in fed]
        self._state.settle_buffers(active.groups, (*names, *fed), self.rows)
        self.rows = 0
        self.take_means(states)

    def leave(self, steps: int) -> Seen:
        """Ranks are lost, or come, and this one has done `steps`: what is under way is left."""
        self._apart, self._states_apart, self.filled = False, False, None
        return Seen(steps, -1, ()) if self.served is None else self.served.leave(steps)

    def end(self) -> int:
        """Workers have made all updates of their steps; bytes that this rank has sent for it."""
        ledger = self._state.world.ledger
        before = ledger.sent
        if self.filled is not None:
            self.filled.drain()
        if self.served is not None:
            self.served.end()
        return ledger.sent - before

    def longest(self, seconds: float) -> float:
        """Of all ranks, where workers end what they do in times of their own."""
        if not self.asynchronous:
            return seconds
        return float(max(self._state.world.everyone.all_gather_json(seconds)))

    def drain(self) -> None:
        """Workers have made all updates of their steps, and have what servers keep."""
        if self.filled is not None:
            self.filled.drain()
        self.flush()
        if self.served is not None:
            self.served.drain()

    def close(self) -> None:
        """As far as others still call alike: nobody waits for this rank's thread."""
        if self.served is not None:
            self.served.close()
            self.served = None
        for name in self._in_common:  # others may go on
            self._state.model.place(name, self._state.model.parameters[name].detach().clone())
        self._in_common = []

    def staleness(self) -> dict[str, Any] | None:
        """Of the gradients that servers, or stages without a flush, stepped by
        (`values/staleness.py`). None where there are none. All ranks call alike."""
        if not (self._served_by or self.filled):
            return None
        ages, lead = Counter[int](), 0
        for record in self._records:
            ages.update(record.ages)
            lead = max(lead, record.lead)
        own = [sorted(ages.items()), lead]
        ages.clear()
        for its, most in self._state.world.everyone.all_gather_json(own):
            ages.update(dict(its))
            lead = max(lead, most)
        stale: dict[str, Any] = to_plain(Staleness.of(ages, lead))
        return stale

    @property
    def _records(self) -> list[ServedRecord]:
        return [*self._past, *([] if self.served is None else [self.served.record])]

    def updates(self) -> int | None:
        """Of a server or stage, the most; None where there are none. All ranks call alike."""
        if not (self._served_by or self.filled):
            return None
        own = sum(record.updates for record in self._records)
        return max(map(int, self._state.world.everyone.all_gather_json(own)))

    def take_means(self, states: bool = False) -> None:
        """Workers have equal parameters, and optimizer states where these are asked for."""
        self.drain()
        if self._apart:
            self._apart = False
            for group, names in self._means:
                _take_mean([self._state.model.parameters[n] for n in names], group)
            if self._outer is not None:
                self._outer.step()
        if states and self._states_apart:
            self._states_apart = False
            self._settle_states()

    def share_attributes(self, active: ActivePlan) -> None:
        """Attributes that an untraced forward keeps come to idle ranks, for the next plan."""
        step, ranks, model = active.step, active.groups.ranks, self._state.model
        idle = set(range(self._state.world.size)) - set(ranks)
        if not step.opaque or not idle:
            return
        tensors = {*model.parameters, *model.buffers}  # these move with the state
        names = [n for n in (*step.changed, *step.fed) if n not in tensors]
        broadcast_state(model, names, self._state.world.everyone, ranks[0], sorted(idle))

    def _settle_states(self) -> None:
        of = self._state.optimizer_state
        for group, names in self._means:
            own = {n: of.described(n, entries) for n in names if (entries := of.of(n))}
            known = group.all_gather_json([own, self._steps(names)])
            for name in names:  # a worker without rows may have no state yet
                if found := next((d[name] for d, _ in known if name in d), None):
                    of.fill(name, found)
            counters = {
                n: c for _, steps in reversed(known) for n, c in steps.items()
            }  # the first's
            for name, steps in counters.items():
                self._state.optimizer.state[self._state.model.parameters[name]]["step"].fill_(
                    steps
                )
            tensors: dict[torch.dtype, list[Tensor]] = {}
            for key, x in ((k, x) for n in names for k, x in of.moving(n).items()):
                if x.dim() or key != "step":
                    tensors.setdefault(x.dtype, []).append(x)
            for alike in tensors.values():
                _take_mean(alike, group)

    def _steps(self, names: Sequence[str]) -> dict[str, float]:
        """Counters of parameters that have one entry, which lie as these do."""
        moving = self._state.optimizer_state.moving
        counters = {n: moving(n).get("step") for n in names}
        return {n: x.item() for n, x in counters.items() if x is not None and not x.dim()}

    def group(self, everyone: Group) -> Group:
        """The ranks that make a step by one gradient."""
        return everyone if self._groups is None else self._groups.worker

    def loss_group(self, everyone: Group) -> Group:
        """The ranks that tell each other their sums of a loss."""
        return self.group(everyone) if self.asynchronous else everyone

    @property
    def count(self) -> int:
        """Of workers that step alone; 1 where there are none."""
        return 1 if self._groups is None else len(self._groups.workers)

    @property
    def index(self) -> int:
        """Of this rank's worker in a table of sums; 0 on an idle rank."""
        return 0 if self.asynchronous else self._number

    @property
    def _number(self) -> int:
        assert self._groups is not None
        position = self._groups.position
        return next((i for i, w in enumerate(self._groups.workers) if position in w), 0)

    def by_worker(self, sums: Tensor) -> Tensor:
        """(workers, *sums.shape): this rank's sums as those of its worker, to be added up."""
        if self.asynchronous:
            return sums[None]
        assert self._groups is not None
        table = sums.new_zeros(len(self._groups.workers), *sums.shape)
        if self._groups.position is not None:
            table[self.index] = sums
        return table


@torch.no_grad()
def _take_mean(tensors: Sequence[Tensor], group: Group) -> None:
    """Of whole numbers and truth values: the first rank's."""
    flat = torch.cat([x.reshape(-1) for x in tensors])
    exact = flat.is_floating_point() or flat.is_complex()
    if group.index and not exact:
        flat.zero_()
    group.all_reduce(flat)
    if exact:
        flat.div_(group.size)
    for x, mean in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(mean.view(x.shape))
