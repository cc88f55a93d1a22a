"""One thread for the traffic of all gloo groups of a process, which drives no other from its core.

A group that torch makes has a device of its own, whose thread wakes every 10 ms even where nothing
is sent, for 0.04 to 0.3 % of a core. On an emulated host with 44 % of a core, where a plan with
stages had been tried, five of them took 3 % of a step. Groups here are on the default group's.

    two all-reduces at once, in two groups of two ranks     96 bytes     0.4 MB      16 MB
    each with a device of its own                            0.80 ms    0.81 ms    17.6 ms
    on one device                                            0.50 ms    0.71 ms    19.4 ms"""

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store
from torch.distributed import Backend

SHARED = "gloo_shared"
LOOP = "gloo_tcp_loop"  # the name of the thread


def shared(backend: str) -> str:
    """`backend`, or the one that makes gloo groups on the default group's device. (gloo itself
    where that is none of gloo, or is wrapped, as in torch's debug mode DETAIL.)"""
    if backend != Backend.GLOO or _default() is None:
        return backend
    if not hasattr(Backend, SHARED.upper()):
        Backend.register_backend(SHARED, _group, devices=["cpu"])
    return SHARED


def wait_for_cores() -> None:
    """Lets gloo's thread wait until a core is free or the running thread's slice is over
    (SCHED_BATCH, `man 7 sched`; Linux). It skips an event of a connection that another thread has
    locked and asks for it again at once: where it has driven that very thread from its core it
    spins for the rest of a slice."""
    if not hasattr(os, "SCHED_BATCH"):
        return
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text().strip() == LOOP:
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _default() -> Any:
    """The default group's part for tensors on a CPU, if it is gloo's."""
    assert dist.group.WORLD is not None
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    except RuntimeError:  # of other devices alone
        return None
    return backend if isinstance(backend, ProcessGroupGloo) else None


def _group(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = ProcessGroupGloo  # whose stubs leave out what is used here
    default, options = _default().options, gloo._Options()
    options._devices, options._threads = default._devices, default._threads
    options._timeout = timeout
    return gloo(store, rank, size, options)
