"""What becomes of an elastic run, decided by one launcher from what those of all hosts tell.

Each host tells what its ranks are, time and again; the answer is the whole state of the run, so
that nothing is lost where an answer is. Ranks leave a generation when one of them is lost, or when
others come who have built what they need; the next one begins when all that live have left."""

import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from torch._C._distributed_c10d import TCPStore

from synchromesh.launcher.generation import Generation, Loss, address_of


@dataclass(frozen=True)
class CoordinatorTuning:
    """Seconds; chosen."""

    meet: float = 300.0  # for all to come to a generation, once the first has; as of a collective
    gather: float = 5.0  # for more hosts or ranks than are needed
    scarce: float = 300.0  # with fewer hosts than are needed, until the run stops
    still: float = 10.0  # of a rank for which all others wait, until it is killed


LIMITS = CoordinatorTuning()


@dataclass(frozen=True)
class Seat:
    """A process that may be a rank."""

    host: str
    slot: int


@dataclass(frozen=True)
class RankState:
    """One as its host tells. ready: the generation up to which it has left all, -1 before it has
    said so. why: what became of it, empty while it lives. unheard: seconds, when it was lost.
    met: its generation; parted: the address of a host with which it has lost a connection there,
    as far as it knows alone. cuts: where its trace is cut."""

    slot: int
    ready: int = Generation.NEW
    marks: Mapping[str, str] = field(default_factory=dict)
    settled: int = 0
    step: int = 0
    why: str = ""
    unheard: float = 0.0
    ended: bool = False  # its work is done
    joins: bool = False  # it was started to come to others
    still: float = 0.0  # seconds, as of `Stillness`, like the next
    waits: float = 0.0
    met: int = 0
    parted: str = ""
    cuts: tuple[str, ...] = ()

    @property
    def there(self) -> bool:
        """Whether it has come so far that it could be a rank."""
        return self.ready >= 0 and not self.why

    @property
    def built(self) -> bool:
        """Whether it has all it needs to come."""
        return bool(self.marks) and self.ready == 0 and not self.why

    @property
    def builds(self) -> bool:
        return not (self.marks or self.why)


@dataclass(frozen=True)
class HostRanks:
    """A host's ranks. failed: what ends the run. leaves: it takes part no longer, if it can.
    stops: its ranks are to stop at a step. unheard: seconds since it told."""

    host: str
    ranks: tuple[RankState, ...]
    failed: str = ""
    leaves: bool = False
    stops: bool = False
    unheard: float = 0.0


@dataclass(frozen=True)
class Orders:
    """What holds for all hosts.

    seats       of each rank of generation `number`; before: of each its rank in the one before
    because     who was lost in the one before; lost: in this one so far
    leave       its ranks are to leave it; leaves: for a host does; late: those that are to be
                killed
    trains      there is somebody to come to; over: some have done all there is to do
    cuts        of those that train
    stay        the first so many ranks do; the others hold nothing, as their hosts leave
    may_go      hosts that leave, of which nothing is needed any more
    asked       hosts that are asked to leave
    refused     by host, why its ranks cannot come
    stop        ranks stop at a step, with a checkpoint
    began       when the run did, in seconds since 1970
    ended, done as of `Generation`
    end         why the run ends; apart: this host is, so that its ranks have nothing to save"""

    number: int = 0
    seats: tuple[Seat, ...] = ()
    before: tuple[int, ...] = ()
    address: str = ""
    port: int = 0
    stay: int = 0
    because: tuple[Loss, ...] = ()
    lost: tuple[Loss, ...] = ()
    leave: bool = False
    leaves: bool = False
    late: tuple[Seat, ...] = ()
    trains: bool = False
    cuts: tuple[str, ...] = ()
    over: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    may_go: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    stop: bool = False
    apart: bool = False
    end: str = ""
    began: float = 0.0
    ended: float = 0.0
    done: int = 0

    @property
    def urgency(self) -> int:
        """Of leaving: 1 as others come, 2 as a host leaves, 3 as ranks are lost; 0: none."""
        return self.leave * (3 if self.lost else 1 + self.leaves)

    def why(self, host: str) -> str:
        """Why a host's part ends; empty where it goes on."""
        if host in self.refused:
            return f"this host cannot come: {self.refused[host]}"
        return self.end and f"the run ended: {self.end}"

    def generation(self, seat: Seat) -> Generation | None:
        """That of a process, where it is a rank of it."""
        if seat not in self.seats:
            return None
        hosts = tuple(s.host for s in self.seats)
        return Generation(
            self.number, self.seats.index(seat), self.before, self.address, self.port, hosts,
            self.stay, self.because, self.began, self.ended, self.done,
        )  # fmt: skip


class Coordinator:
    """host: this one, whose ranks come first; address: at which ranks of all hosts reach it.
    hosts: the least and the most. ranks: with fewer the run ends."""

    def __init__(
        self, host: str, address: str, say: Callable[[str], None], hosts: tuple[int, int] = (1, 1),
        ranks: int = 1,
    ) -> None:  # fmt: skip
        self.host, self.address, self.ranks = host, address, ranks
        self.least, self.most = hosts
        self.orders = Orders(began=time.time())
        self._say = say
        self._hosts: set[str] = set()
        self._heard: dict[str, float] = {}  # when each host told something last
        self._store: TCPStore | None = None
        self._gone: set[Seat] = set()  # of this generation
        self._lost: set[Seat] = set()  # of all: they may speak again, and have nothing to bring
        self._over: set[Seat] = set()  # whose work is done
        self._told: set[tuple[str, str]] = set()  # hosts that cannot come, and why
        self._left: set[Seat] = set()  # that hold nothing in this generation, and leave
        # when last: nobody waited for others, or to come; a host came
        self._met = self._built = self._grown = time.monotonic()
        self._scarce = inf  # since when there are too few hosts
        self._stops = False  # the run is to
        self._ended, self._done, self._done_in = 0.0, 0, 0  # as of `Generation`; in which one
        self.asked: set[str] = set()  # addresses of hosts that are to leave

    def close(self) -> None:
        """Ends the store now: its thread does not survive a fork."""
        self._store = None

    def decide(self, hosts: Sequence[HostRanks]) -> Orders:
        """From what all hosts tell that are there; a host that is not has lost its ranks."""
        known = {Seat(h.host, r.slot): r for h in hosts for r in h.ranks}
        self._stops = any(h.stops for h in hosts)
        self._note(hosts, known)
        if self.orders.end:
            return self.orders
        self._lose(known)
        gone = self._over.union(self._gone)
        alive = {seat: known[seat] for seat in self.orders.seats if seat not in gone}
        coming, leaving = self._coming(known, alive), self._leaving(hosts, alive)
        settled = all(rank.settled == self.orders.number for rank in alive.values())
        if settled:
            self._part(alive, coming, leaving - self._left)
        may_go = {seat.host for seat in self._left} if settled else ()
        over = not self._over.isdisjoint(self.orders.seats)
        self._change(trains=bool(alive), may_go=tuple(may_go), over=over, asked=self._asked(hosts))
        self._change(cuts=next((rank.cuts for rank in alive.values()), ()))
        if alive:
            self._go_on(alive, coming, leaving)
        elif not over:
            fresh = self._gathered(known)
            self._begin(fresh, len(fresh))
        return self.orders

    def _part(
        self, alive: Mapping[Seat, RankState], coming: Sequence[Seat], leaving: set[Seat]
    ) -> None:
        """Ranks leave this generation where others come, or would leave; where they would not go
        on without those, the run stops."""
        if leaving and not any(rank.marks for rank in alive.values()):
            if not self.orders.stop:
                self._say("a host leaves without which the others do not go on: the run stops")
            self._change(stop=True)
        elif coming or leaving:
            self._change(leave=True, leaves=bool(leaving))

    def _asked(self, hosts: Sequence[HostRanks]) -> tuple[str, ...]:
        names = [h.host for h in hosts]
        self.asked &= {*map(address_of, names)}
        return tuple(n for n in names if n != self.host and address_of(n) in self.asked)

    def _go_on(
        self, alive: Mapping[Seat, RankState], coming: Sequence[Seat], leaving: set[Seat]
    ) -> None:
        """With the next generation, once all that live have left this one, if they are to."""
        away = [seat for seat, rank in alive.items() if rank.ready < self.orders.number]
        self._change(late=self._late(away, len(alive)) or self._hung(alive))
        if self.orders.leave and not away and self._enough():
            stay = [*(seat for seat in alive if seat not in leaving), *coming]
            self._begin([*stay, *leaving], len(stay) or len(alive))
            self._left = leaving

    def _note(self, hosts: Sequence[HostRanks], known: Mapping[Seat, RankState]) -> None:
        there = {seat.host for seat, rank in known.items() if rank.there}
        self._heard |= {h.host: time.monotonic() - h.unheard for h in hosts}
        if there - self._hosts:
            self._grown = time.monotonic()
        self._hosts = there
        self._over |= {seat for seat, rank in known.items() if rank.ended}
        settled = [r for r in known.values() if r.settled == self.orders.number]
        if settled:  # of a generation in which nobody is, that before counts
            before = self._done if self._done_in == self.orders.number else 0
            self._done_in = self.orders.number
            self._done = max(before, *(r.step for r in settled))
        for host in [h for h in hosts if h.failed]:
            self._fail(host)

    def _fail(self, host: HostRanks) -> None:
        """Ends the run, or the part of a host that has not come yet."""
        names = {seat.host for seat in self.orders.seats}
        if not names or host.host in names:
            self._change(end=host.failed)
        elif host.host not in self.orders.refused:
            self._say(f"{host.failed}; the others go on")
            self._change(refused={**self.orders.refused, host.host: "its ranks have failed"})

    def _enough(self) -> bool:
        """Whether a generation may begin: there are as many hosts as are asked for, or it is the
        one that stops the run, as others have not come for long."""
        now, count = time.monotonic(), len(self._hosts)
        if count >= self.least or self._stops:
            self._scarce = inf
            return True
        few = f"{count} of at least {self.least} hosts are there"
        if self._scarce == inf:
            self._scarce = now
            self._say(f"{few}: the run waits {LIMITS.scarce:.0f} s for others")
        if now - self._scarce <= LIMITS.scarce:
            return False
        self._say(f"{few}: the run stops")
        self._change(stop=True)
        return True

    def _leaving(self, hosts: Sequence[HostRanks], alive: Collection[Seat]) -> set[Seat]:
        """Processes of hosts that would leave, if others stay."""
        names = {h.host for h in hosts if h.leaves}
        leaving = {seat for seat in alive if seat.host in names}
        return leaving if len(leaving) < len(alive) else set()

    def _late(self, away: Sequence[Seat], alive: int) -> tuple[Seat, ...]:
        """One for whom others have waited too long."""
        now = time.monotonic()
        if not away or len(away) == alive or not self.orders.leave:
            self._met = now
        return tuple(away[:1]) if now - self._met > LIMITS.meet else ()

    def _hung(self, alive: Mapping[Seat, RankState]) -> tuple[Seat, ...]:
        """One that stands still while all others wait for it, once all train."""
        train = all(rank.settled == self.orders.number for rank in alive.values())
        still = [seat for seat, rank in alive.items() if rank.still > LIMITS.still]
        waiting = [seat for seat, rank in alive.items() if rank.waits > LIMITS.still]
        all_wait = waiting and len(waiting) + len(still) == len(alive)
        return tuple(still[:1]) if all_wait and train and not self.orders.lost else ()

    def _change(self, **fields: Any) -> None:
        self.orders = replace(self.orders, **fields)

    def _lose(self, known: Mapping[Seat, RankState]) -> None:
        """Notes ranks that are lost since."""
        losses, over = list[Loss](), self._over.union(self._gone)
        for rank, seat in enumerate(self.orders.seats):
            own = known.get(seat)
            if seat in over or (own is not None and not own.why):
                continue
            why = f"is of host {seat.host}, which is gone" if own is None else own.why
            unheard = time.monotonic() - self._heard[seat.host] if own is None else own.unheard
            losses.append(Loss(rank, why, round(unheard, 3)))
            self._gone.add(seat)
            self._lost.add(seat)
        if not losses:
            return
        self._say("; ".join(map(str, losses)))
        self._ended = time.time()
        self._change(lost=(*self.orders.lost, *losses), leave=True)
        if len({*self.orders.seats} - self._gone - self._over) < self.ranks:
            self._change(end=str(losses[0]))

    def _coming(
        self, known: Mapping[Seat, RankState], alive: Mapping[Seat, RankState]
    ) -> list[Seat]:
        """Processes that could come to those who train: they have built the same."""
        marks = next((rank.marks for rank in alive.values()), {})
        coming, there = list[Seat](), {seat.host for seat in alive}
        if not marks or self.orders.over:
            return coming
        never = self._lost.union(self.orders.seats)
        others = {seat: rank for seat, rank in known.items() if seat not in never}
        for seat in [seat for seat, rank in others.items() if rank.built]:
            if self._admitted(seat.host, others[seat].marks, marks, there):
                coming.append(seat)
                there.add(seat.host)
        now, builds = time.monotonic(), {s.host for s, r in others.items() if r.builds}
        if not coming:
            self._built = now
        soon = not builds.isdisjoint(seat.host for seat in coming)
        return [] if soon and now - self._built < LIMITS.gather else coming

    def _admitted(
        self, host: str, its: Mapping[str, str], marks: Mapping[str, str], there: Collection[str]
    ) -> bool:
        """Whether ranks of a host may come; what is against it is told. there: hosts."""
        why = ""
        if odd := [name for name in marks if its.get(name) != marks[name]]:
            why = f"it differs from the run in its {' and '.join(odd)}"
        elif host not in there and len(there) >= self.most:
            why = f"there are {self.most} hosts, the most that are asked for"
        if why and (host, why) not in self._told:
            self._told.add((host, why))
            self._say(f"host {host} cannot come: {why}")
        if why and host not in {seat.host for seat in self.orders.seats}:
            self._change(refused={**self.orders.refused, host: why})
        return not why and host not in self.orders.refused

    def _gathered(self, known: Mapping[Seat, RankState]) -> list[Seat]:
        """With whom a run begins of which nobody is there, once enough hosts are."""
        fresh = {
            seat: rank for seat, rank in known.items()
            if not (rank.why or rank.joins or seat in self._over)
        }  # fmt: skip
        waited = time.monotonic() - self._grown
        enough = len(self._hosts) >= self.most or waited > LIMITS.gather
        if not enough or len(self._hosts) < self.least or any(r.ready for r in fresh.values()):
            return []
        order = sorted(fresh, key=lambda s: (s.host != self.host, s.host, s.slot))
        hosts = [*dict.fromkeys(seat.host for seat in order)][: self.most]
        return [seat for seat in order if seat.host in hosts]

    def _begin(self, seats: Sequence[Seat], stay: int) -> None:
        """The next generation, if there is anybody. stay: the first so many, behind which those
        come that leave."""
        if not seats:
            return
        earlier = self.orders.seats
        with socket.create_server((self.address, 0)) as server:
            port = server.getsockname()[1]
            self._store = TCPStore(
                self.address, port, is_master=True, wait_for_workers=False,
                master_listen_fd=server.detach(),
            )  # fmt: skip
        before = tuple(earlier.index(s) if s in earlier else Generation.NEW for s in seats)
        self._gone, self._left = set(), set()
        self.orders = Orders(
            self.orders.number + 1, tuple(seats), before, self.address, port,
            stay, because=self.orders.lost, trains=True, over=self.orders.over,
            refused=self.orders.refused, stop=self.orders.stop, began=self.orders.began,
            ended=self._ended, done=self._done,
        )  # fmt: skip
