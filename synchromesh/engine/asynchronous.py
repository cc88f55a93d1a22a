"""Workers that go on without each other, and the servers that step by each one's gradient when it
comes (Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS, section 4.1: Downpour SGD).

    worker i    g_i of w_i     push g_i ---> server    w <- w - step of g_i      fetch w ---> w_i
    worker j        g_j of w_j       push g_j --->     w <- w - step of g_j          fetch w ...

Under `ssp:S,stale=k` (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS) a worker that is to begin step c uses what it has while that has
seen the first c - k steps of all, and else fetches and waits until the server has; between fetches
it steps by itself. Under `shat:S` (Ko and Kim 2022) it takes its own step and then goes a part of
the way, with c_i updates of others since its last one and n workers:

    w_i <- (1 - a) w_i + a w        a = 1 - s / log2 n, within 0 and 1        s = n / c_i

a = 1 is Downpour, a = 0 (also where c_i = 0) n models alone. The paper does not say the base of
the logarithm: with 2, equal workers, whose c_i is n - 1, have an a within 0 and 1.

Servers are threads of the workers' ranks (`engine/update_server.py`), from the first exchange
until all have ended theirs (`drain`)."""

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.groups import Group
from synchromesh.engine.replica import Replica
from synchromesh.engine.servers import MessageTag
from synchromesh.engine.update_server import (
    ENDED,
    ServedRecord,
    Server,
    ServerAnswer,
    WorkerRequest,
)
from synchromesh.values.synchronisation import Synchronisation


class Expected(NamedTuple):
    """What a server will answer: `ServerAnswer`, its part, what to wait for."""

    told: Tensor
    part: Tensor
    works: list[Any]


class Seen(NamedTuple):
    """What a rank knows when others are lost. steps: that it has done. worker: which it is, -1:
    none. by_worker: steps of each whose gradients its server has, if it has one."""

    steps: int
    worker: int
    by_worker: tuple[int, ...]


@dataclass(frozen=True)
class SeenSteps:
    """Of all ranks that are left, whose workers go on behind the one that has done most."""

    ranks: Sequence[Seen]

    @property
    def apart(self) -> bool:
        """Whether there are workers that go on without each other."""
        return any(own.worker >= 0 for own in self.ranks)

    def seen(self, worker: int) -> list[int]:
        """Steps of a worker that each server has, but for one that waits for no more of it."""
        found = (own.by_worker[worker] for own in self.ranks if own.by_worker and worker >= 0)
        return [steps for steps in found if steps < Server.ENDLESS]

    @property
    def newest(self) -> int:
        """Steps that are done. One whose gradient a server has is, though it was interrupted: it
        would be there twice."""
        workers = [own for own in self.ranks if own.worker >= 0] or self.ranks
        return max(max([own.steps, *self.seen(own.worker)]) for own in workers)

    @property
    def left_out(self) -> int:
        """Steps of single workers, lost ones too, before `newest` that not all servers have."""
        newest, workers = self.newest, max(len(own.by_worker) for own in self.ranks)
        least = (min(self.seen(worker), default=newest) for worker in range(workers))
        return sum(max(0, newest - steps) for steps in least)


class Worker:
    """Of one rank: pushes the gradients of its steps and fetches parameters, by `sync`."""

    PATIENCE: ClassVar = 1.0  # seconds that a failed rank lets its server go on; chosen

    def __init__(
        self, sync: Synchronisation, replica: Replica, optimizer: Optimizer, group: Group
    ) -> None:
        """group: of the worker's ranks."""
        self.group = group
        self.sync, self.replica, self.optimizer = sync, replica, optimizer
        self.record = ServedRecord()
        self.server = Server(replica, optimizer, self.record) if replica.serves else None
        self._own: Optimizer | None = None  # steps the replica
        self._step = self._made = 0  # since the last drain; that are over
        self._left = False  # ranks are lost
        self._versions, self._seen = [0] * replica.servers, 0
        self._sum: Tensor | None = None  # of gradients that are not yet pushed
        self._sent: list[Any] = []

    def update(self) -> None:
        """Behind a backward: this worker's step, and what it exchanges with the servers."""
        if self._left:  # they have it
            return
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn
        if self.record.kept:
            self.record.fetched.append([])
        self._step += 1
        if self.server is not None:
            self.server.start()
            self.server.check()
        if self.replica.computes:
            self._exchange_gradients(self.replica.gradients())
        elif self.server is not None:
            self.server.keep_pace(self._step - self._step % self.sync.push)
        if self.server is not None:
            self.server.count()
        self._made = self._step

    def _exchange_gradients(self, gradients: Tensor) -> None:
        sync = self.sync
        self._sum = gradients if self._sum is None else self._sum.add_(gradients)
        if sync.steps_itself:
            self._step_replica()
        pushes = self._step % sync.push == 0
        fetches = self._step % sync.fetch == 0
        if sync.stale:
            fetches = self._all_seen() < self._step - sync.stale
        if pushes or fetches:
            self._exchange(pushes, fetches)

    def _all_seen(self) -> int:
        """Steps of all workers that what every rank of this one has has seen: they fetch alike."""
        least = torch.tensor(-self._seen if self.replica.servers else -Server.ENDLESS)
        self.group.all_reduce(least, "max", counted=False)
        return -int(least)

    def _step_replica(self) -> None:
        """The worker's own step, by an optimizer with a state of its own."""
        if self._own is None:
            self._own = _twin(self.optimizer, self.replica)
        for mine, theirs in zip(self._own.param_groups, self.optimizer.param_groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
        self._own.step()

    def _exchange(self, pushes: bool, fetches: bool) -> None:
        replica = self.replica
        if replica.servers:
            self._exchange_with_servers(pushes, fetches)
        elif fetches:  # the first tensor rank does it
            replica.take(torch.zeros(0, 0))

    def _exchange_with_servers(self, pushes: bool, fetches: bool) -> None:
        replica, column = self.replica, self.replica.column
        vectors, self._sum = (self._sum, None) if pushes else (None, self._sum)
        stale = self.sync.stale or self._step  # else whatever they have seen
        seen = max(0, self._step - stale)
        requests = [
            WorkerRequest(pushes, fetches, self._step - 1, base, seen) for base in self._versions
        ]
        # receives are posted first: whoever answers waits for nothing else then
        others, coming = self._others, self._expect() if fetches else {}
        for server in others:
            self._post(torch.tensor(requests[server]), server, MessageTag.ASKED)
            if vectors is not None:
                self._post(vectors[server], server, MessageTag.GRADIENT)
                column.world.ledger.add("send", replica.part_bytes, 2)
        if self.server is not None and vectors is not None:
            self.server.push(column.index, requests[column.index], vectors[column.index])
        if fetches:
            self._fetch(requests, coming)
        self._wait_for_sends()

    def _expect(self) -> dict[int, Expected]:
        """Receives of what each other server will answer."""
        column, replica = self.replica.column, self.replica
        made = {}
        for server in self._others:
            told = torch.zeros(len(ServerAnswer._fields), dtype=torch.int64)
            part = torch.zeros(replica.length, dtype=replica.dtype)
            its = (told, MessageTag.ANSWERED), (part, MessageTag.PARAMETERS)
            source, group = column.ranks[server], column.messages
            works = [dist.irecv(x, source, group=group, tag=tag) for x, tag in its]
            made[server] = Expected(told, part, works)
        return made

    def _fetch(self, requests: list[WorkerRequest], coming: dict[int, Expected]) -> None:
        replica, index = self.replica, self.replica.column.index
        parts = torch.zeros(replica.servers, replica.length, dtype=replica.dtype)
        answers = {}
        for server, expected in coming.items():
            replica.column.world.receive(expected.works)
            parts[server] = expected.part
            answers[server] = ServerAnswer(*expected.told.tolist())
        if self.server is not None:
            answers[index], parts[index] = self.server.fetch(index, requests[index])
        self._versions = [answers[s].version for s in range(replica.servers)]
        self._seen = min(a.seen for a in answers.values())
        workers = replica.column.size - replica.serving.first
        mixed = sorted(answers.items()) if self.sync.word == "shat" else []
        shares = [share(answer.others, workers) for _, answer in mixed]
        if self.record.kept:
            ones = shares or [1.0] * replica.servers
            self.record.fetched[-1] = [*zip(self._versions, ones, strict=True)]
        replica.take(parts, shares)

    @property
    def _others(self) -> list[int]:
        """Servers on other ranks."""
        replica = self.replica
        return [server for server in range(replica.servers) if server != replica.column.index]

    def _post(self, x: Tensor, server: int, tag: MessageTag) -> None:
        column = self.replica.column
        self._sent.append(dist.isend(x, column.ranks[server], group=column.messages, tag=tag))

    def _wait_for_sends(self) -> None:
        """In the step that began them: a profiler that has ended meanwhile would be told."""
        while self._sent:
            self._sent.pop().wait()

    def leave(self, steps: int) -> Seen:
        """Behind `steps` of this rank: nothing is exchanged any more, nor updated."""
        self._left, seen = True, [] if self.server is None else self.server.leave()
        index = self.replica.column.index if self.replica.computes else -1
        first = steps - self._made
        return Seen(steps, index, tuple(first + n for n in seen))

    def drain(self) -> None:
        """All updates are made, and all workers have what servers keep. All ranks call."""
        self.end()
        self.refresh()

    def refresh(self) -> None:
        """All workers have what servers keep. All ranks call."""
        if self._left:
            return
        replica = self.replica
        replica.refresh()
        if replica.servers:
            versions = replica.column.all_gather(torch.tensor(self.record.updates), counted=False)
            self._versions = versions[: replica.servers].tolist()

    def restart(self) -> None:
        """Servers keep other parameters and states now. All ranks call, behind a drain."""
        self._own = None
        self.refresh()

    def end(self) -> None:
        """All updates are made. All ranks call, those too that have made no step."""
        if self._left:
            return
        if self.server is not None:
            self.server.start()
        if self._sum is not None:
            self._exchange(pushes=True, fetches=False)
        for server in self._others:
            self._post(torch.tensor(ENDED), server, MessageTag.ASKED)
        self._wait_for_sends()
        if self.server is not None:
            self.server.end(self.replica.column.index)
            self.server.join()
            self.server.count()
        self._step = self._made = self._seen = 0

    def close(self) -> None:
        """Tells servers that no more comes, where that is not known. Behind an error it waits for
        nobody, and this rank's server ends with it."""
        with suppress(RuntimeError):
            if sys.exc_info()[0] is None:
                return self.end() if self._step else None
            for server in self._others if self._step else ():
                self._post(torch.tensor(ENDED), server, MessageTag.ASKED)
            if self.server is not None and self._step:
                self.server.end(self.replica.column.index)
                self.server.join(self.PATIENCE)


def share(others: int, workers: int) -> float:
    """How far a worker goes to the server's parameters under SHAT. others: updates of these."""
    if others == 0 or workers < 2:
        return 0.0
    return min(1.0, max(0.0, 1.0 - workers / others / math.log2(workers)))


def _twin(optimizer: Optimizer, replica: Replica) -> Optimizer:
    """As the optimizer, over the replica, with a state of its own."""
    of, left_out = replica.whole_of, ("step", "_opt_called", "param_groups", "state")
    twin = copy.copy(optimizer)
    # a scheduler puts a `step` there that steps the original
    twin.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in left_out}
    twin.param_groups = [
        {**group, "params": [of[p] for p in group["params"] if p in of]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin
