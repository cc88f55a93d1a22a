"""A world: all ranks of a run, its groups, and the generations of an elastic one."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, PrefixStore, TCPStore, get_debug_level

from synchromesh.engine import control_channel, gloo
from synchromesh.engine.connections import Connections
from synchromesh.engine.control_channel import ControlChannel
from synchromesh.engine.device import device_of
from synchromesh.engine.groups import Group
from synchromesh.engine.ledger import Ledger
from synchromesh.launcher import rendezvous
from synchromesh.launcher.generation import Generation
from synchromesh.launcher.member import Member, member

T = TypeVar("T")


class _Waiter:
    """A thread that makes calls which wait for other ranks, until it is asked for None."""

    def __init__(self) -> None:
        self._asked, self.answers = SimpleQueue[Callable[[], Any] | None](), SimpleQueue[Any]()
        self.ask = self._asked.put
        threading.Thread(target=self._run, daemon=True, name="waiter").start()

    def _run(self) -> None:
        while (call := self._asked.get()) is not None:
            try:
                answer: Any = call(), None
            except BaseException as error:  # as torch's of a checkpoint
                answer = None, error
            del call  # and what it holds
            self.answers.put(answer)
            del answer


class World:
    """All ranks of the run, and every group of this process until it is closed."""

    LOOK: ClassVar = timedelta(seconds=1)  # between looks whether a rank is lost, while it waits

    def __init__(
        self, rank: int, size: int, device: torch.device, timeout: timedelta, owner: bool
    ) -> None:
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self.ledger = Ledger()
        self.waited = 0.0  # seconds in which this rank waited for traffic, since it began
        self.choices: dict[tuple[int, ...], str] = {}  # how a group's reduce-scatter is done
        self.control: ControlChannel | None = None
        self.member: Member | None = None  # of an elastic run
        self.alone = False  # until this rank comes to the others of a run that goes on
        self._connections, self._left = Connections(), False
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._rings: set[tuple[int, ...]] = set()
        self._owner = owner  # of the default process group
        self._waiter: _Waiter | None = None

    @classmethod
    def open(
        cls, device: torch.device | str | None = None, timeout: timedelta = timedelta(minutes=5),
        startup: timedelta = timedelta(seconds=60),
    ) -> "World":  # fmt: skip
        """This process's world: of the default process group where one exists (it stays the
        caller's), else of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, else of this process alone.
        timeout: of every collective. startup: within which all ranks must have come."""
        if dist.is_available() and dist.is_initialized():
            chosen = device_of(device, dist.get_rank())
            world = cls(dist.get_rank(), dist.get_world_size(), chosen, timeout, owner=False)
            return world.connect()
        if (own := member()) is not None:
            if own.opened:
                raise ValueError(
                    "a script of an elastic run calls `prepare` or `fit` once: ranks meet anew "
                    "where some are lost, and cannot in a second one"
                )
            own.opened, first = True, own.begin()
            world = cls(0, 1, device_of(device, own.slot), timeout, owner=False)
            world.member, own.cut, world.alone = own, world._connections.cut, first is None
            return world if first is None else world.enter(first)
        here = rendezvous.place()
        if here is None or here.size == 1:
            return cls(0, 1, device_of(device, 0), timeout, owner=False)
        chosen = device_of(device, here.rank)
        store = rendezvous.meet(here, startup)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=here.rank, world_size=here.size, timeout=timeout
        )
        return cls(here.rank, here.size, chosen, timeout, owner=True).connect()

    def connect(self) -> "World":
        """Makes what small messages between all ranks go by; all ranks call alike."""
        if self.backend == "gloo":
            gloo.wait_for_cores()
        if self.backend == "gloo" and not self.blocking:
            self.control = control_channel.connected(self.everyone, self.timeout)
        return self

    def enter(self, generation: Generation) -> "World":
        """Meets the ranks of a generation; all call alike. An error where another one is lost: for
        one that it knows to be connecting gloo waits without a socket that could be shut down."""
        self.rank, self.size, self._owner = generation.rank, generation.size, generation.size > 1
        self._left = self.alone = False
        if self.size == 1:
            return self

        def meet() -> World:
            store = TCPStore(generation.address, generation.port, timeout=self.timeout)
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=PrefixStore(f"generation/{generation.number}", store),
                rank=generation.rank, world_size=generation.size, timeout=self.timeout,
            )  # fmt: skip
            return self.connect()

        with self._connections.noted():
            return self.apart(meet)

    def cut(self) -> None:
        """Whatever is under way in groups fails now."""
        self._left = True
        self._connections.cut()

    def leave(self) -> None:
        """Leaves all groups, behind `cut`; the world is entered anew. A thread of its own waits
        for their end, which a collective that does not end delays until the time-out."""
        left = [x for g in self._groups.values() for x in (g.handle, g.messages, g.ring)]
        left.append(dist.group.WORLD)
        self.close()
        threading.Thread(target=left.clear, daemon=True, name="groups that were left").start()
        if not dist.is_initialized():  # torch names groups by it, also one that was never made
            dist.distributed_c10d._world.group_count = 0
        self._connections.forget()
        self.choices.clear()

    def after(self, work: Any, result: Callable[[], T]) -> Callable[[], T]:
        def finish() -> T:
            self.wait(work)
            return result()

        return finish

    @property
    def lost(self) -> bool:
        """Whether ranks do no longer call alike."""
        told = self.member is not None and self.member.told
        return self._left or told or (self.control is not None and bool(self.control.lost))

    def wait(self, work: Any) -> None:
        """Waits for a collective and counts the seconds; on CUDA the host never waits."""
        began = time.perf_counter()
        if self.elastic:
            self.finish(work)
        else:
            work.wait()
        self.waited += time.perf_counter() - began

    def receive(self, works: Sequence[Any]) -> None:
        """The same of messages, sent or to come; gloo ends all connections where the time of one
        is over."""
        began = time.perf_counter()
        self.apart(lambda: [work.wait() for work in works])
        self.waited += time.perf_counter() - began

    def apart(self, call: Callable[[], T]) -> T:
        """The result of a call that waits for other ranks without end: in an elastic run a thread
        makes it, which is left where it is when they are lost (`finish`)."""
        if self.member is None or not self.elastic:
            return call()
        self._waiter, waiter = None, self._waiter or _Waiter()
        waiter.ask(call)
        while True:
            with suppress(Empty):
                result, error = waiter.answers.get(timeout=self.LOOK.total_seconds())
                break
            if self.member.told:
                waiter.ask(None)
                raise RuntimeError("connection lost: a call does not end")
        self._waiter = waiter
        if error is not None:
            raise error
        return cast(T, result)

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside, this rank calls what others do not, as in a world of its own."""
        before = self.rank, self.size, self._groups
        self.rank, self.size, self._groups = 0, 1, {}
        try:
            yield
        finally:
            self.rank, self.size, self._groups = before

    @property
    def elastic(self) -> bool:
        return self.member is not None and self.backend == "gloo"

    def finish(self, work: Any) -> None:
        """Waits for a collective, of an elastic run. One that does not end behind a cut is left as
        it is: gloo forgets who waits for the rest of a message that has come in part."""
        assert self.member is not None
        while True:
            try:
                work.wait(self.LOOK)
            except RuntimeError as error:
                if work.is_completed() or "timed out" not in str(error):
                    raise
                if not self.member.told:
                    continue
                raise RuntimeError("connection lost: a collective does not end") from None
            return

    def advance(self) -> None:
        """Lets go on what is for a rank's own thread to do: reduce-scatters in rings, and on the
        first rank an exchange that others wait for."""
        if self.control is not None:
            self.control.advance()
        for group in self._groups.values():
            while group.rings and group.rings[0].advance():
                pass

    @property
    def blocking(self) -> bool:
        """Whether even asynchronous collectives return when all have begun: debug mode DETAIL."""
        return get_debug_level() == DebugLevel.DETAIL

    @property
    def everyone(self) -> Group:
        return self.group(tuple(range(self.size)))

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> Group:
        """The group of `ranks`. Making one is collective over the world, members or not. purpose:
        of one whose messages come in another order than those of the usual one."""
        if (ranks, purpose) not in self._groups:
            assert len(set(ranks)) == len(ranks) and all(0 <= r < self.size for r in ranks), ranks
            handle = self._new(ranks) if len(ranks) > 1 else None
            # DETAIL counts operations to compare them between ranks, which messages would upset
            apart = handle is not None and self.blocking
            messages = self._new(ranks) if apart else handle
            if self.rank not in ranks:
                handle = messages = None
            for made in {id(h): h for h in (handle, messages) if h is not None}.values():
                self._first_call(made)
            self._groups[ranks, purpose] = Group(self, ranks, handle, messages)
        return self._groups[ranks, purpose]

    def add_ring(self, ranks: tuple[int, ...]) -> None:
        """Lets the group of `ranks` scatter in a ring; collective over the world. Two ranks need
        none, and in debugging none could begin a round alone."""
        few = len(ranks) < 3 or self.backend != "gloo" or self.blocking
        if few or ranks in self._rings:
            return
        self._rings.add(ranks)
        self.choices.pop(ranks, None)  # there is another way now
        handle, group = self._new(ranks), self.group(ranks)
        group.ring = handle if self.rank in ranks else None

    def _new(self, ranks: tuple[int, ...]) -> Any:
        order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
        backend = gloo.shared(self.backend)
        with self._connections.noted():
            return self.apart(
                lambda: dist.new_group(list(ranks), timeout=self.timeout, backend=backend, **order)
            )

    def _first_call(self, handle: Any) -> None:
        """All members of a new NCCL group call it once: a first call that is a batch of messages,
        in which some have no part, might wait for them for ever (`dist.batch_isend_irecv`)."""
        if self.backend == "nccl":
            dist.all_reduce(torch.zeros(1, device=self.device), group=handle)

    def groups(self, partition: Sequence[tuple[int, ...]], purpose: str = "") -> Group:
        """Makes all groups of a partition of the world and returns the one with this rank."""
        assert sorted(r for ranks in partition for r in ranks) == list(range(self.size)), partition
        made = [self.group(tuple(ranks), purpose) for ranks in partition]
        return next(group for group in made if group.index >= 0)

    def close(self) -> None:
        """Destroys what this world made and drops every reference to it. A reference to a gloo
        group that outlives the interpreter aborts the process at its end."""
        for group in self._groups.values():
            handles = group.handles()
            while handles:
                handle = handles.pop()
                if dist.is_initialized():
                    dist.destroy_process_group(handle)
                del handle
        self._groups.clear()
        self._rings.clear()
        if self.control is not None:
            self.control.close()
            self.control = None
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()
        self._owner = False
