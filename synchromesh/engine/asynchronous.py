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

Servers are threads of the workers' ranks, from the first exchange until all have ended theirs
(`drain`). Messages have tags, by which those of the thread and of the rank's own steps differ."""

import copy
import math
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.groups import Group
from synchromesh.engine.replica import Replica
from synchromesh.values.synchronisation import Synchronisation


class MessageTag(IntEnum):
    ASKED = 1  # what a worker wants, as `WorkerRequest`
    GRADIENT = 2
    ANSWERED = 3  # as `ServerAnswer`
    PARAMETERS = 4


class WorkerRequest(NamedTuple):
    """What a worker asks of a server. step: of its own; base: updates that what its gradient was
    computed on had seen; seen: steps of all workers that the server is to have seen before it
    answers."""

    pushes: int
    fetches: int
    step: int
    base: int
    seen: int


class ServerAnswer(NamedTuple):
    """version: updates that the parameters have seen. others: of these, since the worker's last
    one, those of others. seen: steps of each worker that they have seen."""

    version: int
    others: int
    seen: int


ENDED = WorkerRequest(0, 0, 0, 0, 0)


@dataclass
class ServedRecord:
    """What a rank notes of an asynchronous run.

    ages: how many updates came between what a gradient was computed on and its own, of this
    server. updates: of this server. lead: steps that this worker was ahead of the slowest, at
    most. sent: bytes of this server's answers, not yet counted. order, fetched: where they are
    kept: the (worker, step) of each update of this server; behind each step of this worker what
    it has fetched of each server (its version, and how much of the way it has gone), if it has."""

    ages: Counter[int] = field(default_factory=Counter)
    updates: int = 0
    lead: int = 0
    sent: int = 0
    kept: bool = False
    order: list[tuple[int, int]] = field(default_factory=list)
    fetched: list[list[tuple[int, float]]] = field(default_factory=list)


class Server:
    """Of one rank: its part of the parameters, which the optimizer steps by one gradient at once.

    The rank's own worker calls `push` and `fetch`; the thread does for the others."""

    ENDLESS: ClassVar = 1 << 60  # steps, of a worker that nobody waits for

    def __init__(self, replica: Replica, optimizer: Optimizer, record: ServedRecord) -> None:
        self.replica, self.optimizer, self.record = replica, optimizer, record
        self.column = replica.column
        size = self.column.size
        self._done = [0] * size  # steps of each worker that have been pushed, or that are over
        self._last = [0] * size  # version behind each worker's last update
        self._others = [0] * size  # updates of others before that, since the one before
        self._changed = threading.Condition()
        self._pending: list[tuple[int, WorkerRequest]] = []
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        if self._thread is None and self.column.size > 1:
            self._thread = threading.Thread(target=self._run, name="server", daemon=True)
            self._thread.start()

    def push(self, worker: int, request: WorkerRequest, gradient: Tensor) -> None:
        """The optimizer's step by the gradient of a worker."""
        with self._changed:
            if self.replica.give_gradients(gradient):
                self._update(worker, request)
            self._done[worker] = request.step + 1
            self._changed.notify_all()
        self._answer_pending()

    def _update(self, worker: int, request: WorkerRequest) -> None:
        record = self.record
        self.optimizer.step()
        record.ages[record.updates - request.base] += 1
        if record.kept:
            record.order.append((worker, request.step))
        self._others[worker] = record.updates - self._last[worker]
        record.updates += 1
        self._last[worker] = record.updates

    def fetch(self, worker: int, request: WorkerRequest) -> tuple[ServerAnswer, Tensor]:
        """What the server keeps, once it has seen as much as was asked for."""
        with self._changed:
            while not self._ready(request):
                self._changed.wait(timeout=1.0)
                self.check()
            return self._answer(worker)

    def count(self) -> None:
        """Counts what has been sent: on the rank's own thread, as all else."""
        with self._changed:
            sent, self.record.sent = self.record.sent, 0
        if sent:
            self.column.world.ledger.add("send", sent, 2)

    def check(self) -> None:
        """RuntimeError where the thread has failed."""
        if self.error is not None:
            raise RuntimeError(f"a worker was lost, or its server failed: {self.error}")

    def _ready(self, request: WorkerRequest) -> bool:
        return min(self._done) >= request.seen

    def _answer(self, worker: int) -> tuple[ServerAnswer, Tensor]:
        answer = ServerAnswer(self.record.updates, self._others[worker], min(self._done))
        return answer, self.replica.part()

    def end(self, worker: int) -> None:
        """A worker has done its last step before a drain: nobody waits for it."""
        with self._changed:
            self._done[worker] = self.ENDLESS
            self._changed.notify_all()
        self._answer_pending()

    def join(self) -> None:
        """Waits for the other workers' last steps; the next exchange begins anew."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
        self._done = [0] * self.column.size

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # the rank's own worker says it
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _serve(self) -> None:
        open_, asked = self.column.size - 1, torch.zeros(len(ENDED), dtype=torch.int64)
        gradient = torch.zeros(self.replica.length, dtype=self.replica.dtype)
        while open_:
            worker = self._received(asked)
            request = WorkerRequest(*asked.tolist())
            if request == ENDED:
                open_ -= 1
                self.end(worker)
            if request.pushes:
                self._receive(gradient, worker, MessageTag.GRADIENT)
                self.push(worker, request, gradient)
            if request.fetches:
                with self._changed:
                    self._pending.append((worker, request))
                self._answer_pending()

    def _answer_pending(self) -> None:
        """Of those who wait: the rank's own worker may have done the step that they wait for."""
        with self._changed:
            ready = [p for p in self._pending if self._ready(p[1])]
            self._pending = [p for p in self._pending if p not in ready]
            answers = [(worker, *self._answer(worker)) for worker, _ in ready]
            self.record.sent += len(answers) * self.replica.part_bytes
        for worker, answer, part in answers:
            self._send(torch.tensor(answer), worker, MessageTag.ANSWERED)
            self._send(part, worker, MessageTag.PARAMETERS)

    def _received(self, into: Tensor) -> int:
        source = dist.recv(into, None, group=self.column.messages, tag=MessageTag.ASKED)
        return self.column.ranks.index(source)

    def _receive(self, into: Tensor, worker: int, tag: MessageTag) -> None:
        dist.recv(into, self.column.ranks[worker], group=self.column.messages, tag=tag)

    def _send(self, x: Tensor, worker: int, tag: MessageTag) -> None:
        dist.send(x, self.column.ranks[worker], group=self.column.messages, tag=tag)


class Worker:
    """Of one rank: pushes the gradients of its steps and fetches parameters, by `sync`."""

    def __init__(
        self, sync: Synchronisation, replica: Replica, optimizer: Optimizer, group: Group
    ) -> None:
        """group: of the worker's ranks."""
        self.group = group
        self.sync, self.replica, self.optimizer = sync, replica, optimizer
        self.record = ServedRecord()
        self.server = Server(replica, optimizer, self.record) if replica.serves else None
        self._own: Optimizer | None = None  # steps the replica
        self._step = 0  # since the last drain
        self._versions, self._seen = [0] * replica.servers, 0
        self._sum: Tensor | None = None  # of gradients that are not yet pushed
        self._sent: list[Any] = []

    def update(self) -> None:
        """Behind a backward: this worker's step, and what it exchanges with the servers."""
        sync, gradients = self.sync, self.replica.gradients()
        if self.record.kept:
            self.record.fetched.append([])
        self._step += 1
        self._sum = gradients if self._sum is None else self._sum.add_(gradients)
        if sync.steps_itself:
            self._step_replica()
        pushes = self._step % sync.push == 0
        fetches = self._step % sync.fetch == 0
        if sync.stale:
            fetches = self._all_seen() < self._step - sync.stale
        if pushes or fetches:
            self._exchange(pushes, fetches)
        if self.server is not None:
            self.server.count()
        if sync.stale:
            self.record.lead = max(self.record.lead, self._step - self._all_seen())

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
        if self.server is not None:
            self.server.start()
            self.server.check()
        vectors, self._sum = (self._sum, None) if pushes else (None, self._sum)
        stale = self.sync.stale or self._step  # else whatever they have seen
        seen = max(0, self._step - stale)
        requests = [
            WorkerRequest(pushes, fetches, self._step - 1, base, seen) for base in self._versions
        ]
        others = self._others
        for server in others:
            self._post(torch.tensor(requests[server]), server, MessageTag.ASKED)
            if vectors is not None:
                self._post(vectors[server], server, MessageTag.GRADIENT)
                column.world.ledger.add("send", replica.part_bytes, 2)
        if self.server is not None and vectors is not None:
            self.server.push(column.index, requests[column.index], vectors[column.index])
        if fetches:
            self._fetch(requests, others)
        self._wait_for_sends()

    def _fetch(self, requests: list[WorkerRequest], others: list[int]) -> None:
        replica, index = self.replica, self.replica.column.index
        parts = torch.zeros(replica.servers, replica.length, dtype=replica.dtype)
        answers = {}
        for server in others:
            told = torch.zeros(len(ServerAnswer._fields), dtype=torch.int64)
            self._receive(told, server, MessageTag.ANSWERED)
            self._receive(parts[server], server, MessageTag.PARAMETERS)
            answers[server] = ServerAnswer(*told.tolist())
        if self.server is not None:
            answers[index], parts[index] = self.server.fetch(index, requests[index])
        self._versions = [answers[s].version for s in range(replica.servers)]
        self._seen = min(a.seen for a in answers.values())
        size = replica.column.size
        mixed = sorted(answers.items()) if self.sync.word == "shat" else []
        shares = [share(answer.others, size) for _, answer in mixed]
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

    def _receive(self, into: Tensor, server: int, tag: MessageTag) -> None:
        column = self.replica.column
        dist.recv(into, column.ranks[server], group=column.messages, tag=tag)

    def drain(self) -> None:
        """All updates are made, and all workers have what servers keep. All ranks call."""
        self.end()
        self.replica.refresh()

    def end(self) -> None:
        """All updates are made."""
        if self._step:
            column = self.replica.column
            if self._sum is not None:
                self._exchange(pushes=True, fetches=False)
            if self.server is not None:
                self.server.start()
            for server in self._others:
                self._post(torch.tensor(ENDED), server, MessageTag.ASKED)
            self._wait_for_sends()
            if self.server is not None:
                self.server.end(column.index)
                self.server.join()
                self.server.count()
            self._step = self._seen = 0

    def close(self) -> None:
        """Tells servers that no more comes, where that is not known; after failures too."""
        with suppress(RuntimeError):
            if self._step and not self.replica.column.world.lost:
                self.end()


def share(others: int, workers: int) -> float:
    """How far a worker goes to the server's parameters under SHAT. others: updates of these."""
    if others == 0 or workers < 2:
        return 0.0
    return min(1.0, max(0.0, 1.0 - workers / others / math.log2(workers)))


def _twin(optimizer: Optimizer, replica: Replica) -> Optimizer:
    """As the optimizer, over the replica, with a state of its own."""
    of = replica.whole_of
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**group, "params": [of[p] for p in group["params"] if p in of]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin
