"""The control channel: small messages of all ranks, over each one's connection with the first.

    ranks 1, 2, 3  --own-->  0        then        0  --everyone's-->  1, 2, 3

gloo takes 0.3 to 1 ms of processor for a few numbers, as a collective runs in a thread of its own
and wakes the one that reads from sockets in each round. Here who sends writes, who waits reads.

Every rank says first which of the trainer's methods it is in (`checked_gather`), in one small
exchange, of one size for all methods, so that ranks in different ones get a sentence:

    rank 0    save   ]
    rank 1    step   ]->  an error on both, no wait for ever and no message of a wrong size

Where no connections can be made (hosts that do not reach the first rank at MASTER_ADDR), between
accelerators, and in groups of some ranks, the group's all-gather serves."""

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from synchromesh.launcher.generation import ADDRESS
from synchromesh.launcher.machine import boot, namespace
from synchromesh.values.caution import caution

HEADER = struct.Struct("qq")  # which exchange of the run, bytes


@dataclass(frozen=True)
class ControlLimits:
    """Bounds of the channel; all were chosen, not measured."""

    under_way: int = 64  # exchanges that may be
    connecting: float = 5.0  # seconds until ranks do without
    ranks: int = 256  # at most: a process may have 1,024 files
    numbers: int = 18  # that a rank may send with a method's (`checked_gather`)
    apart: int = 12  # times as long as for a collective a quick worker may wait for a slow one


LIMITS = ControlLimits()


class Reachable(Protocol):
    """What is asked of a group (engine/groups.py)."""

    ranks: tuple[int, ...]
    index: int
    size: int
    world: Any

    def start_all_gather(self, x: Tensor, counted: bool = True) -> Callable[[], Tensor]: ...

    def all_gather_json(self, value: Any) -> list[Any]: ...


Numbers = Sequence[int]


def start_numbers(
    group: Reachable, numbers: Numbers
) -> Callable[[Numbers], list[tuple[int, ...]]]:
    """Begins to gather as many numbers of each rank; the wait takes the first rank's own."""
    channel = _of(group)
    if channel is None:
        own = torch.tensor(numbers, device=group.world.device)
        wait = group.start_all_gather(own, counted=False)
        return lambda _: [*map(tuple, wait().tolist())]
    form = struct.Struct(f"{len(numbers)}q")
    finish = channel.start(form.pack(*numbers))

    return lambda last: [*form.iter_unpack(_waited(group, finish, form.pack(*last)))]


def all_gather_numbers(group: Reachable, numbers: Numbers) -> list[tuple[int, ...]]:
    return start_numbers(group, numbers)(numbers)


def start_all_gather(group: Reachable, x: Tensor) -> Callable[[], Tensor]:
    """Begins to gather `x`, of equal shape everywhere; the wait gives (size, *x.shape)."""
    channel = _of(group)
    if channel is None:
        return group.start_all_gather(x, counted=False)
    own = x.numpy().tobytes()
    finish, shape = channel.start(own, settled=True), (group.size, *x.shape)
    return lambda: torch.frombuffer(_waited(group, finish, own), dtype=x.dtype).view(shape)


def _waited(group: Reachable, finish: Callable[[bytes], bytearray], own: bytes) -> bytearray:
    began = time.perf_counter()
    content = finish(own)
    group.world.waited += time.perf_counter() - began
    return content


def _of(group: Reachable) -> "ControlChannel | None":
    channel: ControlChannel | None = group.world.control
    return channel if channel is not None and group.ranks == channel.ranks else None


ALIKE = "ranks call alike, also after an error, which all of them catch or none"


class ControlChannel:
    """This rank's connection with the first one, or the first one's with all others, by rank."""

    def __init__(self, links: dict[int, socket.socket], size: int, timeout: timedelta) -> None:
        self.ranks, self._links = tuple(range(size)), links
        self._timeout = timeout.total_seconds()
        self.wait_apart(False)
        for link in links.values():
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count = 0  # exchanges begun
        self._early: dict[tuple[int, int], bytearray] = {}  # by rank and exchange
        self.lost = ""  # why a connection was
        # of the first rank:
        self._open = set[int]()  # exchanges that have not ended
        self._settled: tuple[int, bytes] | None = None  # one of these that `advance` may end
        self._told: dict[int, bytearray] = {}  # what one was that it has ended

    def wait_apart(self, apart: bool) -> None:
        """apart: ranks come here in times of their own, as workers do that go on without each
        other: only one that has ended is lost at once."""
        for link in self._links.values():
            link.settimeout(self._timeout * (LIMITS.apart if apart else 1))

    def start(self, own: bytes, settled: bool = False) -> Callable[[bytes], bytearray]:
        """Begins an exchange of messages of equal length; the wait takes the first rank's, gives
        all. settled: whether that is `own`: others need not wait until the first rank does, once
        all have sent theirs (`advance`). Exchanges begin and end in equal order on all ranks.
        RuntimeError once a connection is lost, from then on and on every rank: what they have sent
        no longer fits together."""
        if self.lost:
            raise RuntimeError(f"{self.lost}; this trainer cannot go on")
        self._count += 1
        number = self._count
        if 0 in self._links:
            self._send(number, own)
        else:
            self._open.add(number)
            self._open.discard(number - LIMITS.under_way)
            self._settled = (number, own) if settled else self._settled

        def finish(first: bytes) -> bytearray:
            if 0 in self._links:
                return self._receive(0, number, len(self.ranks) * len(own))
            if number not in self._told:
                self._tell(number, first)
            return self._told.pop(number)

        return finish

    def advance(self) -> None:
        """On the first rank, amid other work: ends an exchange that is settled, if all have sent
        theirs. Others may wait for it, and this rank comes to it late."""
        if self._settled is None:
            return
        number, own = self._settled
        first = number == min(self._open, default=0)  # others may wait for an earlier one
        if first and all(self._came(rank, number) for rank in self.ranks[1:]):
            self._tell(number, own)

    def _tell(self, number: int, first: bytes) -> None:
        if self._settled is not None and self._settled[0] == number:
            self._settled = None
        self._open.discard(number)
        gathered = bytearray(first)
        for rank in self.ranks[1:]:
            gathered += self._receive(rank, number, len(first))
        self._send(number, gathered)
        self._told = {number: gathered}

    def _came(self, rank: int, number: int) -> bool:
        """Whether a rank's message of an exchange is there."""
        while (rank, number) not in self._early:
            there = select.poll()  # files may have numbers above those that `select` takes
            there.register(self._links[rank], select.POLLIN)
            if not there.poll(0):
                return False
            self._keep(rank, number)
        return True

    def _keep(self, rank: int, number: int) -> None:
        """Waits for a rank's next message, of exchange `number` or an earlier one."""
        sent, content = self._next(rank)
        if sent > number:
            raise self._end(rank, ConnectionError(f"it is at a later step: {ALIKE}"))
        self._early[rank, sent] = content
        self._early.pop((rank, sent - LIMITS.under_way), None)

    def _send(self, number: int, content: bytes | bytearray) -> None:
        message = HEADER.pack(number, len(content)) + content
        for rank, link in self._links.items():
            try:
                link.sendall(message)
            except OSError as error:
                raise self._end(rank, error) from None

    def _receive(self, rank: int, number: int, size: int) -> bytearray:
        """What a rank sent in exchange `number`. What it sent in earlier ones, which may end after
        this one, stays until then; of those that a failed step has given up, the last few."""
        while (content := self._early.pop((rank, number), None)) is None:
            self._keep(rank, number)
        if len(content) != size:
            raise self._end(rank, ConnectionError(f"it is in another call: {ALIKE}"))
        return content

    def _next(self, rank: int) -> tuple[int, bytearray]:
        try:
            number, size = HEADER.unpack(self._read(rank, HEADER.size))
            return number, self._read(rank, size)
        except OSError as error:
            raise self._end(rank, error) from None

    def _read(self, rank: int, size: int) -> bytearray:
        """No more than that: the socket tells whether there is more (`_came`)."""
        content = bytearray(size)
        left = memoryview(content)
        while left:
            if not (got := self._links[rank].recv_into(left)):
                raise ConnectionError("it has ended")
            left = left[got:]
        return content

    def _end(self, rank: int, error: OSError) -> RuntimeError:
        """Ends all connections, which others see."""
        why = error.strerror or error
        if isinstance(error, TimeoutError):
            why = "it sent nothing in time (`timeout` of prepare)"
        self.lost = f"connection with rank {rank} lost: {why}"
        for link in self._links.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        return RuntimeError(self.lost)

    def close(self) -> None:
        for link in self._links.values():
            link.close()


def connected(everyone: Reachable, timeout: timedelta) -> ControlChannel | None:
    """The channel of all ranks, which call alike; None, with a warning, where it cannot be."""
    if not 1 < everyone.size <= LIMITS.ranks:
        return None
    here = f"{boot()} {namespace()}"
    local = set(everyone.all_gather_json(here)) == {here}
    links: dict[int, socket.socket] = {}
    listener, port, key = None, 0, secrets.token_hex(16)
    if everyone.index == 0:
        with suppress(OSError):  # no port is free, or none may be had: then nobody connects
            listener = _listener(local, os.environ.get(ADDRESS, ""))
            port = listener.getsockname()[1]
    of_rank = os.environ.get(ADDRESS) or os.environ.get("MASTER_ADDR", "")
    port, key, address = everyone.all_gather_json([port, key, of_rank])[0]
    address = "127.0.0.1" if local else address
    try:
        if listener is not None:
            _accept(listener, links, key, everyone.size)
        elif everyone.index:
            links[0] = socket.create_connection((address, port), LIMITS.connecting)
            links[0].sendall(f"{key}{everyone.index:8}".encode())
    except OSError:  # told below, for all of them
        pass
    channel = ControlChannel(links, everyone.size, timeout)
    reached = everyone.all_gather_json(len(links) == (1 if everyone.index else everyone.size - 1))
    if all(reached):
        return channel
    channel.close()
    if everyone.index == 0:
        _warn([rank for rank, there in enumerate(reached) if rank and not there], address, port)
    return None


def _warn(others: Sequence[int], address: str, port: int) -> None:
    caution(
        f"ranks {others or 'that rank 0 expected'} did not connect to rank 0 at "
        f"{address or 'MASTER_ADDR, which is not set,'} port {port} within "
        f"{LIMITS.connecting:.0f} s, so what ranks agree on goes by gloo, which takes longer (0.3 "
        "to 12 ms): set MASTER_ADDR to an address of rank 0 that all hosts reach on any port"
    )


def _listener(local: bool, address: str) -> socket.socket:
    """On a port of this host alone, or at its address, or at all of them where none is known, IPv6
    too where it is to be had."""
    if not local and address:
        return socket.create_server((address, 0), backlog=LIMITS.ranks)
    if not local and socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=LIMITS.ranks
            )
    return socket.create_server(("127.0.0.1" if local else "", 0), backlog=LIMITS.ranks)


def _accept(listener: socket.socket, links: dict[int, socket.socket], key: str, size: int) -> None:
    """The links of all other ranks, by rank; who does not know `key` is none."""
    deadline = time.monotonic() + LIMITS.connecting
    with listener:
        while len(links) < size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(max(0.01, deadline - time.monotonic()))
            said = link.recv(len(key) + 8, socket.MSG_WAITALL)
            if secrets.compare_digest(said[:-8], key.encode()):
                links[int(said[-8:])] = link
            else:
                link.close()


# A gather that checks in which method each rank is

EXCHANGE, STEP, EVALUATE, EVALUATED = "exchange", "step", "evaluate", "evaluated"
WORDS = {
    EXCHANGE: "in prepare, in gather_numbers or at a batch of a stream",
    STEP: "in step or backward", EVALUATE: "in evaluate", EVALUATED: "at the end of evaluate",
}  # fmt: skip
METHODS = (
    *WORDS, "adapt", "buffers", "export", "predict", "resume", "save", "state_dict", "switch",
    "whole",
)  # fmt: skip


def checked_gather(group: Reachable, method: str, numbers: Numbers = ()) -> list[tuple[int, ...]]:
    """The numbers of every rank; ValueError on all where one is in another method."""
    return start_checked_gather(group, method, numbers)(numbers)


def start_checked_gather(
    group: Reachable, method: str, numbers: Numbers
) -> Callable[[Numbers], list[tuple[int, ...]]]:
    """Begins one; the function that waits for it (`start_numbers`)."""
    here, padding = METHODS.index(method), [0] * (LIMITS.numbers - len(numbers))
    finish = start_numbers(group, [here, *numbers, *padding])
    return lambda last: _checked(group, finish([here, *last, *padding]), len(numbers))


def _checked(group: Reachable, table: list[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    places = [METHODS[row[0]] for row in table]
    if {*places} == {EVALUATE, EVALUATED}:
        ended = [group.ranks[i] for i, place in enumerate(places) if place == EVALUATED]
        raise ValueError(
            f"ranks {ended} have no more batches while the others have: give every rank equally "
            "many, with 0 rows where it has none; trainer.loader does"
        )
    if odd := [i for i, place in enumerate(places) if place != places[0]]:
        first, other = (WORDS.get(places[i], f"in {places[i]}") for i in (0, odd[0]))
        raise ValueError(
            f"rank {group.ranks[0]} is {first}, rank {group.ranks[odd[0]]} {other}: every rank "
            "calls the trainer's methods alike and in the same order, also those of which only "
            "one needs the result (no `if rank == 0:` around save, evaluate or state_dict)"
        )
    return [row[1 : 1 + count] for row in table]
