"""A rendezvous: how the processes of a run find each other, from the variables that torchrun sets.

Everything here ends within a deadline and names the rank or variable at fault; torch alone would
leave a process that reached a foreign listener waiting for ever."""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

T = TypeVar("T")


@dataclass(frozen=True)
class Timeouts:
    """Seconds; chosen, not measured."""

    answer: float = 15.0  # for a store to answer once something listens at its port
    attempt: float = 5.0  # for one attempt to reach it


TIMEOUTS = Timeouts()


class StartError(TimeoutError):
    """The run could not start: who or what is missing, and the remedy; a user's to correct."""


@dataclass(frozen=True)
class Place:
    """This process among all: its rank, how many there are, where their store listens."""

    rank: int
    size: int
    address: str = ""
    port: int = 0
    attempt: int = 0  # of torchrun's restarts
    agent_store: bool = False  # torchrun's agent already serves the store

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def place(env: Mapping[str, str] = os.environ) -> Place | None:
    """The place that RANK, WORLD_SIZE, ... describe, None without; an error names all faults."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    faults: list[str] = []

    def number(name: str, default: int | None = None) -> int:
        text = env.get(name, "")
        if not text and default is not None:
            return default
        if not text:
            faults.append(f"{name} is not set")
        elif not text.removeprefix("-").isdecimal():
            faults.append(f"{name} is not a whole number ({text!r})")
        else:
            return int(text)
        return -1

    rank, size, port = number("RANK"), number("WORLD_SIZE"), 0
    if not faults:
        if size < 1:
            faults.append(f"WORLD_SIZE must be at least 1 (it is {size})")
        elif not 0 <= rank < size:
            faults.append(f"RANK must be from 0 to WORLD_SIZE - 1 = {size - 1} (it is {rank})")
    if size > 1 or env.get("MASTER_PORT"):
        before = len(faults)
        port = number("MASTER_PORT")
        if len(faults) == before and not 0 < port < 2**16:
            faults.append(f"MASTER_PORT must be from 1 to 65535 (it is {port})")
    address = env.get("MASTER_ADDR", "") if size > 1 else ""
    if size > 1 and not address:
        faults.append("MASTER_ADDR is not set")
    attempt = number("TORCHELASTIC_RESTART_COUNT", 0)
    if faults:
        raise ValueError(
            f"the environment does not describe a place in a run: {'; '.join(faults)}. Start the "
            "processes with torchrun or `synchromesh run`, or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT"
        )
    agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, address, port, attempt, agent_store)


def meet(here: Place, timeout: timedelta) -> Store:
    """A store that all ranks share, under a prefix of its own for every attempt and opening.

    A restarted torchrun hands out the store of the attempt before (torch 2.13), whose stale
    addresses gloo would connect to; hence the prefix. ValueError where a port is taken or sizes
    disagree, StartError with the missing ranks after `timeout`, sooner where another program
    holds the port."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = _join(here, deadline)
        try:
            opening = store.add(f"synchromesh/{here.attempt}/opened/{here.rank}", 1)
            store = PrefixStore(f"synchromesh/{here.attempt}/{opening}", store)
            store.set(f"here/{here.rank}", str(here.size))
            _wait_for_all(store, here, timeout, deadline)
            sizes = {r: int(store.get(f"here/{r}")) for r in range(here.size)}
            break
        except RuntimeError as error:
            # a store of an earlier opening that rank 0 was about to close: the next one comes
            if here.rank == 0 or time.monotonic() > deadline:
                raise StartError(
                    f"rank {here.rank} lost the store of rank 0 at {here.where} while the run "
                    "started: see rank 0's error"
                ) from error
            time.sleep(0.05)
    if set(sizes.values()) != {here.size}:
        raise ValueError(
            f"ranks were started with different WORLD_SIZE: {sizes}; give all of them the same"
        )
    return store


def _wait_for_all(store: Store, here: Place, timeout: timedelta, deadline: float) -> None:
    seconds = timeout.total_seconds()
    missing = [r for r in range(here.size) if r != here.rank]
    while missing := [r for r in missing if not store.check([f"here/{r}"])]:
        if time.monotonic() > deadline:
            raise StartError(
                f"ranks {missing} of {here.size} did not start within {seconds:.0f} s (rank "
                f"{here.rank} waits at {here.where}); start them, or correct WORLD_SIZE"
            )
        time.sleep(0.005)


def _serves(here: Place) -> bool:
    return here.rank == 0 and not here.agent_store


def _join(here: Place, deadline: float) -> Store:
    """The store, which rank 0 may open late; but whatever listens there has to answer soon."""
    while True:
        if not _serves(here):
            while why := _no_listener(here, deadline):
                if time.monotonic() > deadline:
                    raise _unreached(here, why)
                time.sleep(0.05)
        left = max(1.0, deadline - time.monotonic())
        soon = timedelta(seconds=min(TIMEOUTS.answer, left))
        try:
            store = _within(soon, partial(_connect, here, soon), here)
        except StartError:  # unless a store of an earlier opening has closed just now
            if _serves(here) or not _no_listener(here, deadline) or time.monotonic() > deadline:
                raise
        else:
            store.set_timeout(timedelta(seconds=left))
            return store


def _no_listener(here: Place, deadline: float) -> str:
    """Why nothing listens where the store should be; "" where something does."""
    left = max(0.1, min(TIMEOUTS.attempt, deadline - time.monotonic()))
    try:
        socket.create_connection((here.address, here.port), left).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _unreached(here: Place, reason: str) -> StartError:
    return StartError(
        f"rank {here.rank} cannot reach the store of rank 0 at {here.where} ({reason}); check "
        "MASTER_ADDR, MASTER_PORT and that rank 0 runs"
    )


def _connect(here: Place, timeout: timedelta) -> Store:
    try:
        return TCPStore(
            here.address, here.port, world_size=here.size, is_master=_serves(here),
            timeout=timeout, multi_tenant=True, wait_for_workers=False,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ValueError(
                f"port {here.port} of {here.address} is in use by another program; choose a free "
                "MASTER_PORT"
            ) from None
        raise _unreached(here, str(error).splitlines()[0]) from None


def _within(timeout: timedelta, function: Callable[[], T], here: Place) -> T:
    """`function()`, given up after `timeout` even where torch itself would wait for ever."""
    result: list[T] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=call, daemon=True, name="rendezvous")
    thread.start()
    thread.join(timeout.total_seconds() + 1.0)
    if failure:
        raise failure[0]
    if not result:
        raise StartError(
            f"what listens at {here.where} did not answer rank {here.rank} as a store within "
            f"{timeout.total_seconds():.0f} s: another program may use the port (choose a free "
            f"MASTER_PORT), or rank 0's machine is too busy for {here.size} ranks (start fewer)"
        )
    return result[0]
