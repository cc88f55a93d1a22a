"""A function on local ranks: for notebooks, and scripts that are no command of their own."""

import json
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from synchromesh.launcher.launcher import quiet
from synchromesh.values.fault import LOST

T = TypeVar("T")


def launch(function: Callable[..., T], *args: Any, nproc: int = 2, **named: Any) -> T:
    """What `function(*args, **named)` returns on rank 0 of `nproc` processes of this machine, in
    which `prepare` finds the others. They are forks: the function may stand in a notebook and read
    what is there, and changes of that are not seen here. Each computes with one thread.

    ValueError for fewer processes than one, in a rank of another launch, or once CUDA is in use,
    which forks do not survive; RuntimeError with the traceback of the rank that failed first."""
    if not callable(function) or not isinstance(nproc, int) or nproc < 1:
        raise ValueError(
            f"launch: give a function, and nproc of at least 1, not {function!r}, nproc={nproc!r}"
        )
    if "RANK" in os.environ:
        raise ValueError(
            f"launch: this process is rank {os.environ['RANK']} of a launch already: call the "
            "function itself"
        )
    if torch.cuda.is_initialized():
        raise ValueError(
            "launch: this process has begun to use a GPU, which its forks could not: restart it, "
            "and put models on devices inside of the function alone"
        )

    def rank() -> T | None:
        torch.set_num_threads(1)  # more than one may wait for ever behind a fork
        os.environ["OMP_NUM_THREADS"] = "1"  # for libraries that would set their own number
        try:
            returned = function(*args, **named)
        except SystemExit as end:
            raise RuntimeError(
                f"the function has ended its process: exit code {end.code}"
            ) from end
        return _sendable(returned) if os.environ["RANK"] == "0" else None

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=nproc, run_id=uuid.uuid4().hex, max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="fork",
        monitor_interval=0.1, logs_specs=DefaultLogsSpecs(),
    )  # fmt: skip
    try:
        with quiet():
            returned: T = elastic_launch(config, rank)()[0]
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        message = failure.message
        if _lost(message):  # by another rank, whose end may be seen after this one's
            number, message = _cause(Path(failure.error_file)) or (number, message)
        raise RuntimeError(_told(message, number, nproc)) from None
    return returned


def _sendable(returned: T) -> T:
    """What comes back to the process that has launched. RuntimeError for what cannot."""
    try:
        ForkingPickler.dumps(returned)
    except Exception as error:
        raise RuntimeError(
            f"what the function returned ({type(returned).__name__}) cannot be sent "
            f"to the process that has launched it: return numbers, or detached tensors ({error})"
        ) from None
    return returned


def _cause(seen: Path) -> tuple[int, Any] | None:
    """The rank that failed of itself, and what it left beside the file of another one."""
    for file in sorted(seen.parents[1].glob("*/error.json")):
        with suppress(OSError, ValueError):  # one that is being written is of a rank that is late
            message = json.loads(file.read_text())["message"]
            if not _lost(message):
                return int(file.parent.name), message
    return None


def _lost(message: Any) -> bool:
    return bool(LOST.match(_kept(message).removeprefix("RuntimeError: ")))


def _kept(message: Any) -> str:
    return str(message.get("message", message) if isinstance(message, dict) else message)


def _told(message: Any, rank: int, ranks: int) -> str:
    """Of what torch's agent has kept of a rank's end."""
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return f"rank {rank} of {ranks} failed: {extra.get('py_callstack') or _kept(message)}"
