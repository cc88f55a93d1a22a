"""Workers that go on without each other, walked from event to event: what they wait, how stale
their gradients are.

    worker i    computes | sends a part of its gradient to each server | gets a part of each | ...
    server s    updates when a part has come; answers when it has seen what was asked for

What a worker does at the end of a step is what `engine/asynchronous.py` does. A message takes a
link out of its sender and one into its receiver, whole, as soon as both are free and in the order
in which messages were sent: those of all workers follow each other on the link of a server. A
server that is a worker as well has no message from itself. All make as many steps, and then meet.

    age of a gradient    updates of others between its worker's last fetch and its own update
    lead                 steps of a worker that pushes, less those of the slowest, at most"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synchromesh.values.fields import to_plain
from synchromesh.values.staleness import Staleness
from synchromesh.values.synchronisation import Synchronisation

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class WalkTuning:
    """Chosen: of how many steps a walk is, fewer where they have so many messages that walking
    them takes seconds. servers: above which some are walked as one, which has all their links."""

    steps: int = 100
    fewest: int = 3
    messages: int = 50_000
    servers: int = 8

    def of(self, workers: int, servers: int) -> int:
        """Steps of each worker."""
        each = 2 * workers * max(1, min(servers, self.servers))  # pushes and fetches
        return max(self.fewest, min(self.steps, self.messages // each))


TUNING = WalkTuning()


class MessageSeconds(NamedTuple):
    """Of one worker's push to one server, and of what it fetches from one."""

    push: float = 0.0
    fetch: float = 0.0


NO_MESSAGES = MessageSeconds()


_Link = tuple[Literal["out", "in"], int]  # of a rank
_Then = Callable[[], None]


class _Message(NamedTuple):
    """busy: for how many seconds the links out of its sender and into its receiver are taken."""

    busy: Mapping[_Link, float]
    then: _Then


@dataclass(frozen=True)
class WorkersWalk:
    """steps: of each worker. seconds: until all have met. computed: of them, by worker. apart:
    seconds until the first has done its steps, and how many steps all had done by then."""

    steps: int
    seconds: float
    computed: tuple[float, ...]
    apart: tuple[float, int]
    ages: Counter[int]
    lead: int

    NOTHING: ClassVar[dict[str, Any]] = {
        "worker_steps": 0,
        "waiting_shares": [],
        "staleness": None,
    }

    @property
    def waiting_shares(self) -> tuple[float, ...]:
        """Of the time of each worker: for messages, for others, and at the end."""
        return tuple(1.0 - own / self.seconds for own in self.computed)

    @property
    def gain(self) -> float:
        """Steps a second while all are under way, over those until they have met."""
        seconds, done = self.apart
        return done / seconds / (len(self.computed) * self.steps / self.seconds)

    @property
    def staleness(self) -> Staleness | None:
        """None where there are no servers."""
        return Staleness.of(self.ages, self.lead) if self.ages else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "worker_steps": self.steps, "waiting_shares": list(self.waiting_shares),
            "staleness": to_plain(self.staleness),
        }  # fmt: skip


def walk(
    sync: Synchronisation, computing: Floats, messages: MessageSeconds, dedicated: bool = False
) -> WorkersWalk:
    """computing: seconds of each step of each worker, (steps, workers). dedicated: whether servers
    are other ranks."""
    return _WorkersWalk(sync, computing, messages, dedicated).run()


class _WorkersWalk:
    def __init__(
        self, sync: Synchronisation, computing: Floats, messages: MessageSeconds, dedicated: bool
    ) -> None:
        self.sync, self.computing, self.messages = sync, computing, messages
        self.steps, self.count = computing.shape
        servers, workers = range(min(sync.servers, TUNING.servers)), range(self.count)
        self.servers, self.each = servers, sync.servers / max(1, len(servers))
        self.places = [server + self.count * dedicated for server in servers]  # among all links
        self.now, self._events, self._order = 0.0, list[tuple[float, int, _Then]](), 0
        self._queues = defaultdict[_Link, dict[int, _Message]](dict)  # what is not yet under way
        self._busy = set[_Link]()
        self.ages, self.lead = Counter[int](), 0
        self.ended: list[float] = []
        self.apart = (0.0, 0)
        self._step, self._left = [0] * self.count, [0] * self.count  # messages awaited
        self._seen = [0.0] * self.count  # steps of all that what a worker has has seen
        self._version = [0 for _ in servers]
        self._done = [[0.0 for _ in workers] for _ in servers]  # steps that a server has seen
        self._base = [[0 for _ in workers] for _ in servers]  # version that a worker has fetched
        self._own = [[0 for _ in workers] for _ in servers]  # its updates since
        self._told = [[0.0 for _ in workers] for _ in servers]  # steps of all that it had seen
        self._pending: list[list[tuple[int, int]]] = [[] for _ in servers]

    def run(self) -> WorkersWalk:
        for worker in range(self.count):
            self._begin(worker)
        while self._events:
            self.now, _, then = heappop(self._events)
            then()
        return WorkersWalk(
            self.steps, max(self.ended), tuple(self.computing.sum(axis=0).tolist()), self.apart,
            self.ages, self.lead,
        )  # fmt: skip

    def _at(self, time: float, then: _Then) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, then))

    def _send(self, a: _Link, b: _Link, seconds: Sequence[float], then: _Then) -> None:
        """A message that takes both links, each for its seconds; `then` it is there."""
        if a[1] == b[1] or not any(seconds):
            return self._at(self.now, then)
        self._order += 1
        message = _Message(dict(zip((a, b), seconds, strict=True)), then)
        for link in message.busy:
            self._queues[link][self._order] = message
        self._start(self._order, message)

    def _start(self, number: int, message: _Message) -> bool:
        if not self._busy.isdisjoint(message.busy):
            return False
        for link, seconds in message.busy.items():
            self._busy.add(link)
            del self._queues[link][number]
            self._at(self.now + seconds, partial(self._freed, link))
        self._at(self.now + max(message.busy.values()), message.then)
        return True

    def _freed(self, link: _Link) -> None:
        self._busy.remove(link)
        for number, message in self._queues[link].items():
            if self._start(number, message):
                break  # it is taken again

    def _begin(self, worker: int) -> None:
        step = self._step[worker]
        if step < self.steps:
            then = partial(self._computed, worker)
            return self._at(self.now + float(self.computing[step, worker]), then)
        if not self.ended:
            self.apart = self.now, sum(self._step)
        self.ended.append(self.now)
        for server in self.servers:  # nobody waits for it
            self._done[server][worker] = float("inf")
            self._answer(server)

    def _computed(self, worker: int) -> None:
        self._step[worker] += 1
        step, sync, first = self._step[worker], self.sync, worker + 1
        pushes = step % sync.push == 0 or step == self.steps
        fetches = step % sync.fetch == 0
        if sync.stale:
            fetches = self._seen[worker] < step - sync.stale
        self._left[worker] = len(self.servers) * (pushes + fetches)
        for server in sorted(self.servers, key=lambda s: (s - first) % self.count):
            asked = partial(self._asked, worker, server) if fetches else None
            if pushes:
                come = partial(self._pushed, worker, server, step - 1, asked)
                taken = self.each * self.messages.push, self.messages.push
                self._send(("out", worker), ("in", self.places[server]), taken, come)
            elif asked:
                self._at(self.now, asked)
        if not self._left[worker]:
            self._begin(worker)

    def _pushed(self, worker: int, server: int, step: int, asked: _Then | None) -> None:
        """A part of a gradient has come: the server updates."""
        done, own = self._done[server], self._own[server]
        self.lead = max(self.lead, int(step - min(done)))
        self.ages[self._version[server] - self._base[server][worker] - own[worker]] += 1
        self._version[server] += 1
        own[worker] += 1
        done[worker] = step + 1
        self._answer(server)
        self._came(worker)
        if asked:
            asked()

    def _asked(self, worker: int, server: int) -> None:
        stale = self.sync.stale
        self._pending[server].append((worker, self._step[worker] - stale if stale else 0))
        self._answer(server)

    def _answer(self, server: int) -> None:
        """Those whose answer the server has seen enough for."""
        seen = min(self._done[server])
        ready = [p for p in self._pending[server] if p[1] <= seen]
        self._pending[server] = [p for p in self._pending[server] if p[1] > seen]
        for worker, _ in ready:
            self._base[server][worker], self._own[server][worker] = self._version[server], 0
            self._told[server][worker] = seen
            taken = self.messages.fetch, self.each * self.messages.fetch
            out: _Link = ("out", self.places[server])
            self._send(out, ("in", worker), taken, partial(self._came, worker))

    def _came(self, worker: int) -> None:
        """One of the messages that a worker waits for is there."""
        self._left[worker] -= 1
        if not self._left[worker]:
            self._seen[worker] = min(told[worker] for told in self._told)
            self._begin(worker)
