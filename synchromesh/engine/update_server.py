"""The server of an asynchronous plan: a thread of a worker's rank that steps its part of the
parameters by one gradient at once, when it comes, and answers who asks for them.

    worker i    asks, sends a gradient ---> server    w <- w - step of g_i      answers, sends w

Messages have tags, by which those of the thread and of the rank's own steps differ. An answer goes
while the next gradient comes: workers post their receives before they ask."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from synchromesh.engine.control_channel import LIMITS
from synchromesh.engine.replica import Replica
from synchromesh.engine.servers import MessageTag
from synchromesh.values.optimizer import step_aged


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

    ages: how many updates of others came between what a gradient was computed on and its own, of
    this server. updates: of this server. lead: steps that a worker which pushed to it was ahead of
    the slowest, at most. sent: bytes of this server's answers, not yet counted. order, fetched:
    where they are kept: the (worker, step) of each update of this server; behind each step of this
    worker what it has fetched of each server (its version, and how much of the way it has gone),
    if it has."""

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

    LOOK: ClassVar = 0.1  # seconds between looks whether ranks are lost, while it waits; chosen
    ENDLESS: ClassVar = 1 << 60  # steps, of a worker that nobody waits for

    def __init__(self, replica: Replica, optimizer: Optimizer, record: ServedRecord) -> None:
        self.replica, self.optimizer, self.record = replica, optimizer, record
        self.column = replica.column
        size = self.column.size
        self._done = self._none_done()  # steps of each worker that are pushed, or that are over
        self._last = [0] * size  # version behind each worker's last update
        self._others = [0] * size  # updates of others before that, since the one before
        self._own = [0] * size  # updates of each worker since it last fetched
        self._changed = threading.Condition()
        self._pending: list[tuple[int, WorkerRequest]] = []
        self._answered: dict[int, list[Any]] = {}  # what is sent to each worker
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self._left = False  # ranks are lost
        self.by_age = False  # learning rates are divided by it

    def _none_done(self) -> list[int]:
        """Behind a drain; nobody waits for a rank that computes no rows."""
        first = self.replica.serving.first
        return [self.ENDLESS] * first + [0] * (self.column.size - first)

    def start(self) -> None:
        """Others may ask from here on, until all have ended."""
        if self._thread is None and self.column.size > 1:
            self._thread = threading.Thread(target=self._run, name="server", daemon=True)
            self._thread.start()

    def push(self, worker: int, request: WorkerRequest, gradient: Tensor) -> None:
        """The optimizer's step by the gradient of a worker."""
        with self._changed:
            if self._left:
                raise RuntimeError("ranks are lost")
            self.record.lead = max(self.record.lead, request.step - min(self._done))
            self._others[worker] = self.record.updates - self._last[worker]
            if self.replica.give_gradients(gradient):
                self._update(worker, request)
                self.replica.forget_gradients()
            self._last[worker] = self.record.updates
            self._done[worker] = request.step + 1
            self._changed.notify_all()
        self._answer_pending()

    def _update(self, worker: int, request: WorkerRequest) -> None:
        record = self.record
        age = record.updates - request.base - self._own[worker]
        step_aged(self.optimizer, age if self.by_age else 0)
        record.ages[age] += 1
        self._own[worker] += 1
        if record.kept:
            record.order.append((worker, request.step))
        record.updates += 1

    def fetch(self, worker: int, request: WorkerRequest) -> tuple[ServerAnswer, Tensor]:
        """What the server keeps, once it has seen as much as was asked for."""
        with self._changed:
            while not self._ready(request):
                self._changed.wait(self.LOOK)
                self.check()
            return self._answer(worker)

    def keep_pace(self, steps: int) -> None:
        """Waits until all workers have pushed so many steps: a rank that only serves would else
        come to the end of an epoch at once, and wait for the others no longer than a collective
        may. RuntimeError where nobody has pushed for as long as a quick worker waits for a slow
        one."""
        patience = LIMITS.apart * self.column.world.timeout.total_seconds()
        with self._changed:
            came, since = sum(self._done), time.monotonic()
            while min(self._done) < steps:
                self._changed.wait(self.LOOK)
                self.check()
                if sum(self._done) != came:
                    came, since = sum(self._done), time.monotonic()
                elif time.monotonic() - since > patience:
                    late = [self.column.ranks[i] for i, n in enumerate(self._done) if n < steps]
                    raise RuntimeError(
                        f"no worker has pushed a gradient for {patience:.0f} s, and ranks {late} "
                        f"have not done step {steps}: see what they wait for, or give prepare a "
                        "longer timeout"
                    )

    def leave(self) -> list[int]:
        """Nothing is stepped from here on; steps of each worker whose gradients came since the
        last drain. The thread ends by itself, once what it waits for fails."""
        with self._changed:
            self._left = True
            return [*self._done]

    def count(self) -> None:
        """Counts what has been sent: on the rank's own thread, as all else."""
        with self._changed:
            sent, self.record.sent = self.record.sent, 0
        if sent:
            self.column.world.ledger.add("send", sent, 2)

    def check(self) -> None:
        """RuntimeError where the thread has failed, or ranks are lost, which it need not hear."""
        if self.error is not None:
            raise RuntimeError(f"a worker was lost, or its server failed: {self.error}")
        if self.column.world.lost:
            raise RuntimeError("connection lost: ranks are lost, or come")

    def _ready(self, request: WorkerRequest) -> bool:
        return min(self._done) >= request.seen

    def _answer(self, worker: int) -> tuple[ServerAnswer, Tensor]:
        self._own[worker] = 0
        answer = ServerAnswer(self.record.updates, self._others[worker], min(self._done))
        return answer, self.replica.part()

    def end(self, worker: int) -> None:
        """A worker has done its last step before a drain: nobody waits for it."""
        with self._changed:
            self._done[worker] = self.ENDLESS
            self._changed.notify_all()
        self._answer_pending()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the other workers' last steps; the next exchange begins anew."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout or self.LOOK)
            self.check()
            if timeout is not None:
                break
        self._thread = None
        self.check()
        for worker in [*self._answered] if timeout is None else ():
            self._wait_for_answer(worker)
        self._done, self._own = self._none_done(), [0] * self.column.size

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
            self._wait_for_answer(worker)
            its = (torch.tensor(answer), MessageTag.ANSWERED), (part, MessageTag.PARAMETERS)
            self._answered[worker] = [self._send(x, worker, tag) for x, tag in its]

    def _wait_for_answer(self, worker: int) -> None:
        """The last one has gone: that worker has it since before it asked again."""
        for work in self._answered.pop(worker, ()):
            work.wait()

    def _received(self, into: Tensor) -> int:
        source = dist.recv(into, None, group=self.column.messages, tag=MessageTag.ASKED)
        return self.column.ranks.index(source)

    def _receive(self, into: Tensor, worker: int, tag: MessageTag) -> None:
        dist.recv(into, self.column.ranks[worker], group=self.column.messages, tag=tag)

    def _send(self, x: Tensor, worker: int, tag: MessageTag) -> Any:
        return dist.isend(x, self.column.ranks[worker], group=self.column.messages, tag=tag)
