"""A replay of an asynchronous run by one process: the updates of all servers in the order that
they noted, of gradients computed on the versions that workers noted.

    a server      order      (worker 1, step 0) (worker 0, step 0) (worker 1, step 1) ...
    a worker      fetched    version 2          version 3 ...      behind each of its steps

Each server is played by a whole model with an optimizer of its own, of which its boxes count: an
elementwise update of one entry knows nothing of others. What a worker computes on is put together
of the boxes of all servers. As ever the optimizers are given the plan's gradients, which are
compared with those computed at the same point (`SingleProcess`)."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from synchromesh.checkpoint.local_tensor import box_view
from synchromesh.checkpoint.switch import redistribute
from synchromesh.engine.batches import row_count, to_device
from synchromesh.engine.plan_groups import workers
from synchromesh.trace.capture.batch import take, take_parts
from synchromesh.training.trainer import Trainer
from synchromesh.values.boxes import Box, full_box
from synchromesh.verify.deviation import Deviations
from synchromesh.verify.reference import Computed, SingleProcess
from synchromesh.verify.workers import joint_buffers
from synchromesh.workloads.workload import Workload

Tensors = dict[str, Tensor]
Told = list[tuple[int, float]]  # of each server of a column: version, how much of the way


@dataclass
class RanServer:
    """A rank that keeps parts: its order, and what it had behind each of its updates."""

    order: list[tuple[int, int]]  # (data index, step)
    model: nn.Module
    optimizer: Any
    versions: list[Tensors] = field(default_factory=list)
    pushed: dict[int, int] = field(default_factory=dict)  # steps of each worker so far

    def keep(self) -> None:
        named = self.model.named_parameters()
        self.versions.append({n: p.detach().clone() for n, p in named})

    @property
    def next(self) -> tuple[int, int] | None:
        done = len(self.versions) - 1
        return self.order[done] if done < len(self.order) else None


@dataclass
class RanWorker:
    """A data index: its ranks, what they have fetched behind each step, what came of its steps."""

    ranks: Sequence[int]
    fetched: Mapping[int, list[Told]]  # by rank
    process: SingleProcess
    batches: list[list[Any]]
    own: Any = None  # the optimizer of its own steps
    gradients: list[Tensors] = field(default_factory=list)  # the plan's
    losses: list[float] = field(default_factory=list)
    done: int = 0
    known: int = -1  # the last step behind which it has what it fetched
    rows: int = 0
    made: Computed | None = None  # of the last step


class OrderReplay:
    """On rank 0; the other ranks tell what they have. All ranks call alike."""

    def __init__(
        self, trainer: Trainer, reference: nn.Module, workload: Workload, deviations: Deviations
    ) -> None:  # fmt: skip
        self.trainer, self.deviations = trainer, deviations
        self._reference, self._workload = reference.to(trainer.world.device), workload
        self._losses: list[float] = []
        self._gradients: list[Tensors] = []
        self._batches: list[Any] = []
        served = trainer.workers.served
        assert served is not None, "an asynchronous plan leaves no rank idle"
        self._record = served.record
        self._record.kept = True
        self._column = served.replica.column.ranks

    def note(self, batch: Any, value: Tensor) -> None:
        """Behind a backward."""
        self._batches.append(to_device(batch, self.trainer.world.device))
        self._losses.append(float(value))
        leaves = self.trainer.workers.leaves.items()
        self._gradients.append(
            {n: (torch.zeros_like(p) if p.grad is None else p.grad).clone() for n, p in leaves
             if p.requires_grad}
        )  # fmt: skip

    def compare(self, steps: int) -> None:
        """At the end: all that was noted with what one process makes of it."""
        trainer, record = self.trainer, self._record
        buffers = trainer.buffers()  # settles them, and parameters
        told = [record.order, record.fetched, self._losses, self._column]
        known = trainer.world.everyone.all_gather_json(told)
        its = list(self._workers([[*map(_tuples, of[1])] for of in known]))
        for worker in its:
            worker.losses = known[worker.ranks[0]][2]
            worker.gradients = [*self._gathered(worker.ranks)]
        made = self._replayed(its, known) if trainer.rank == 0 else None
        self.deviations.shards("parameter", trainer.parameters(), made, steps)
        joint = joint_buffers(
            [w.process for w in its], [w.made for w in its], [w.rows for w in its]
        )
        self.deviations.shards("buffer", buffers, joint, steps)

    def _workers(self, fetched: Sequence[list[Told]]) -> Iterator[RanWorker]:
        trainer, plan = self.trainer, self.trainer.plan
        ranks = plan.devices(trainer.world.size)
        positions = workers(c.layout for c in trainer.partition.components)
        for index, its in enumerate(positions):
            own = [ranks[p] for p in its]
            process = SingleProcess(
                copy.deepcopy(self._reference), self._workload, trainer.world.device,
                trainer.options.autocast,
            )  # fmt: skip
            batches = [self._own(batch, index, len(positions)) for batch in self._batches]
            worker = RanWorker(own, {r: fetched[r] for r in own}, process, batches)
            if plan.sync.steps_itself:
                worker.own = self._workload.build_optimizer(process.model.parameters())
            yield worker

    def _own(self, batch: Any, index: int, count: int) -> list[Any]:
        """The rows of a worker; its micro-batches where batch norm normalises each by itself."""
        plan = self.trainer.plan
        own = take_parts(batch, plan.own_rows(row_count(batch), count, index))
        if not (rows := row_count(own)):
            return []
        if not self.trainer.model.statistics:
            return [own]
        return [take(own, start, stop) for start, stop in plan.micro_rows(rows)]

    def _gathered(self, ranks: Sequence[int]) -> Iterator[Tensors]:
        """The plan's gradients of each step of a worker, whole on rank 0."""
        state, world = self.trainer.state, self.trainer.world
        for gradients in self._gradients:
            made: Tensors = {}
            for name, own in gradients.items():
                holding = replace(state.holdings[name], servers=0)
                have = state.sides(holding, state.ranks)
                have = tuple(x if r in ranks else () for r, x in enumerate(have))
                shape = state.model.described[name].shape
                want = tuple((full_box(shape),) * (r == 0) for r in range(world.size))
                made[name] = redistribute(own, have, want, shape, world.everyone).clone()
            yield made

    def _replayed(self, its: list[RanWorker], known: Sequence[Any]) -> Computed:
        """The parameters in the end."""
        self._column_of = [of[3] for of in known]
        self._servers = {r: self._server(of[0]) for r, of in enumerate(known) if self._keeps(r)}
        while self._go_on(its):
            pass
        assert all(worker.done == len(worker.batches) for worker in its), "the order has a gap"
        assert not any(server.next for server in self._servers.values()), "the order has a gap"
        named = its[0].process.model.named_parameters()
        values = {n: p.detach().clone() for n, p in named}
        for rank, server in self._servers.items():
            for name, value in values.items():
                self._lay(value, server.versions[-1][name], name, rank, 1.0)
        floors = {n: float(x.abs().max()) * torch.finfo(x.dtype).eps for n, x in values.items()}
        return Computed({"parameter": values}, {"parameter": floors})

    def _keeps(self, rank: int) -> bool:
        return any(self._boxes(name, rank) for name in self.trainer.model.parameters)

    def _server(self, order: Sequence[Sequence[int]]) -> RanServer:
        model = copy.deepcopy(self._reference)
        optimizer = self._workload.build_optimizer(model.parameters())
        server = RanServer([(worker, step) for worker, step in order], model, optimizer)
        server.keep()
        return server

    def _go_on(self, its: Sequence[RanWorker]) -> bool:
        """Whether any worker could make a step, or any server an update."""
        moved = False
        for worker in its:
            while worker.done < len(worker.batches) and self._fetched(worker, worker.done - 1):
                self._step(worker)
                moved = True
        for server in self._servers.values():
            while server.next and its[server.next[0]].done > server.next[1]:
                self._update(server, its)
                moved = True
        return moved

    def _step(self, worker: RanWorker) -> None:
        k, batch = worker.done, worker.batches[worker.done]
        worker.done += 1
        if not batch:
            return
        made, compare = worker.process.backward(*batch), self.deviations.compare
        worker.rows, worker.made = worker.rows + sum(map(row_count, batch)), made
        compare("loss", torch.tensor(worker.losses[k], dtype=torch.float64), made, "", k + 1)
        for name, gradient in worker.gradients[k].items():
            compare("gradient", gradient, made, name, k + 1)
        if worker.own is not None:
            self._give(worker.process.model, worker.gradients[k], worker.process.model)
            worker.own.step()

    def _fetched(self, worker: RanWorker, step: int) -> bool:
        """The worker has what it fetched behind a step; whether that is known yet."""
        if step <= worker.known:
            return True
        told = {r: of[step] for r, of in worker.fetched.items() if of[step]}
        wanted = {self._column_of[r][s]: of for r, its in told.items() for s, of in enumerate(its)}
        if any(len(self._servers[r].versions) <= version for r, (version, _) in wanted.items()):
            return False
        for rank, (version, share) in wanted.items():
            kept = self._servers[rank].versions[version]
            for name, p in worker.process.parameters.items():
                self._lay(p.detach(), kept[name], name, rank, share)
        worker.known = step
        return True

    def _update(self, server: RanServer, its: Sequence[RanWorker]) -> None:
        assert server.next is not None
        index, step = server.next
        worker, first = its[index], server.pushed.get(index, 0)
        server.pushed[index] = step + 1
        total: Tensors = {}
        for k in range(first, step + 1):
            for name, gradient in worker.gradients[k].items():
                total[name] = total[name] + gradient if name in total else gradient
        self._give(server.model, total, worker.process.model)
        age = self._age(server, worker, index, step) if self.trainer.options.by_age else 0
        groups = server.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] / max(1, age)
        server.optimizer.step()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        server.keep()

    def _age(self, server: RanServer, worker: RanWorker, index: int, step: int) -> int:
        """Updates of others between what a worker had in a step and its gradient of it."""
        rank = next(r for r, of in self._servers.items() if of is server)
        known = 0
        for own, fetched in worker.fetched.items():
            column = self._column_of[own]
            told = [of[column.index(rank)][0] for of in fetched[:step] if of and rank in column]
            known = max(known, *told, 0)
        return sum(who != index for who, _ in server.order[known : len(server.versions) - 1])

    @staticmethod
    def _give(model: nn.Module, gradients: Mapping[str, Tensor], like: nn.Module) -> None:
        """Gradients for the parameters of which `like` has one."""
        has = {n for n, p in like.named_parameters() if p.grad is not None}
        for name, p in model.named_parameters():
            p.grad = gradients[name].reshape(p.shape) if name in has else None

    def _boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        state = self.trainer.state
        return state.sides(state.holdings[name], state.ranks)[rank]

    def _lay(self, into: Tensor, kept: Tensor, name: str, rank: int, share: float) -> None:
        """What a server keeps of a parameter, to where it lies in the whole."""
        if not self.trainer.state.holdings[name].replica:
            return
        whole = (full_box(tuple(into.shape)),)
        for box in self._boxes(name, rank):
            new, old = box_view(kept, whole, box), box_view(into.data, whole, box)
            old.copy_(new if share == 1.0 else old.lerp(new, share))


def _tuples(told: Sequence[Sequence[float]]) -> Told:
    return [(int(version), float(share)) for version, share in told]
