"""Ranks for a test: `run(n, function, *args)` forks n gloo ranks and returns what each one
returned."""

import gc
import io
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it: once here rather than in every rank
import torch.distributed as dist
import torch.distributed.tensor  # the same for torch.testing.assert_close

from synchromesh.trace.capture.capture import trace
from synchromesh.values import buckets
from synchromesh.values.buckets import BucketSizes
from tests.bucket_sizes import SEVERAL


class RankFailed(AssertionError):
    """A rank raised or died; the message holds the first failing rank's traceback."""


def _rank(
    rank: int, size: int, folder: str, timeout: float, out: Connection, function: Any, args: Any
) -> None:
    gc.freeze()  # what the process of the tests has made is not for its ranks to collect
    if BucketSizes() == buckets.SIZES:
        buckets.SIZES = SEVERAL  # models of some kilobytes fill several buckets
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
        )
        result = function(*args)
        data = (
            io.BytesIO()
        )  # not through torch's own pickling, whose shared memory ends with this process
        torch.save(result, data)
        out.send(("ok", time.monotonic(), data.getvalue()))
        out.poll(5.0)  # for the others: one may still be about to connect to this rank
    except BaseException:
        out.send(("failed", time.monotonic(), traceback.format_exc()))
    finally:
        out.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        os._exit(0)


@cache
def _warm_up() -> None:
    """What torch imports and builds at the first trace of a process: once here rather than in
    every rank."""
    trace(torch.nn.Linear(1, 1), lambda m, x: m(x).mean(), torch.ones(2, 1), training=True)


def run(size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`function(*args)` on `size` ranks with a default process group; results by rank.

    Fork start: costs 0.1 s instead of the 1.4 to 3.5 s of spawn. Raises `RankFailed` with the
    traceback of the rank that failed first; kills every rank after `timeout` seconds.
    """
    _warm_up()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [
            context.Process(
                target=_rank, args=(r, size, folder, timeout, pipes[r][1], function, args)
            )
            for r in range(size)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        answers: dict[int, tuple[str, float, Any]] = {}
        deadline = time.monotonic() + timeout
        pending = {receiver: r for r, (receiver, _) in enumerate(pipes)}
        try:
            while pending and time.monotonic() < deadline:
                for receiver in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                    rank = pending.pop(receiver)  # type: ignore[call-overload]
                    try:
                        answers[rank] = receiver.recv()  # type: ignore[union-attr]
                    except EOFError:
                        answers[rank] = ("failed", time.monotonic(), "died without a word")
                if any(kind == "failed" for kind, _, _ in answers.values()):
                    deadline = min(deadline, time.monotonic() + 2.0)  # the others fail in its wake
        finally:
            for receiver, _ in pipes:
                with suppress(OSError):  # a rank that has failed is gone
                    receiver.send("end")
            for process in processes:
                process.join(timeout=1.0 if not pending else 0.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    failed = sorted(
        (when, rank, text) for rank, (kind, when, text) in answers.items() if kind == "failed"
    )
    if failed:
        _, rank, text = failed[0]
        raise RankFailed(f"rank {rank} of {size}:\n{text}")
    if pending:
        raise RankFailed(
            f"ranks {sorted(pending.values())} of {size} did not finish in {timeout:.0f} s"
        )
    return [torch.load(io.BytesIO(answers[r][2]), weights_only=False) for r in range(size)]
