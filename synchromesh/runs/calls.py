"""Calls of process groups: while a recording runs, each says its name and its ranks, and each
wait for one that it waits.

gloo's ranges in a profile have neither. DDP, FSDP2, torch's pipelining and our engine all call
methods of `ProcessGroup` and `Work.wait`, so these are wrapped in annotations as
`synchromesh::all_reduce 0,1`; only DDP's reducer calls from C++, where nothing can be wrapped. An
annotation takes 0.6 us, one by torch.profiler.record_function 15 us, by which waits would seem
shorter than they are."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._C._profiler import _RecordFunctionFast as Annotation

ANNOTATION = "synchromesh::"  # begins a range that a call of a process group has from us
WAIT = f"{ANNOTATION}wait"  # the range in which a thread waits for a communication
MESSAGES = ("send", "receive")
_NAMES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "barrier": "barrier", "send": "send", "recv": "receive",
    "sendrecv": "send_receive",  # one NCCL kernel for both
}  # fmt: skip
_LONGEST_FIRST = sorted(_NAMES, key=len, reverse=True)
METHODS = (
    "allreduce", "allreduce_coalesced",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single",
    "broadcast", "reduce", "gather", "scatter", "barrier",
    "send", "recv",
)  # fmt: skip


def communication_name(text: str) -> str | None:
    """Our name of a collective or message by a method of a process group (`_allgather_base`), an
    operator (`c10d::allreduce_`), a range (`gloo:recv`) or a kernel
    (`ncclDevKernel_AllReduce_Sum_f32_RING_LL`); None where it is none."""
    last = text.rpartition(":")[2].rpartition("Kernel_")[2]
    plain = last.replace("_", "").lower()
    return next((_NAMES[key] for key in _LONGEST_FIRST if plain.startswith(key)), None)


def everyone() -> tuple[int, ...]:
    """All ranks of the default process group, or this process alone."""
    ready = dist.is_available() and dist.is_initialized()
    return tuple(range(dist.get_world_size())) if ready else (0,)


def rank() -> int:
    """This process among them."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextmanager
def annotated() -> Iterator[None]:
    """Inside, every call of a process group and every wait for one is a range in the profile."""
    if not dist.is_available():
        yield
        return
    own = vars(dist.ProcessGroup)  # names differ between versions of torch
    with ExitStack() as patches:
        for name in (name for name in METHODS if name in own):
            wrapped = _annotated(name, getattr(dist.ProcessGroup, name))
            patches.enter_context(patch.object(dist.ProcessGroup, name, wrapped))
        patches.enter_context(patch.object(dist.Work, "wait", _annotated_wait(dist.Work.wait)))
        yield


def _annotated(method_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    name = communication_name(method_name)
    assert name is not None, method_name

    @wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        if name in MESSAGES:  # (tensors, the other's index in the group, tag)
            here, there = ranks[dist.get_rank(group)], ranks[args[1]]
            ranks = [here, there] if name == "send" else [there, here]
        with Annotation(f"{ANNOTATION}{name} {','.join(map(str, ranks))}"):
            return method(group, *args, **kwargs)

    return call


def _annotated_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        with Annotation(WAIT):
            return method(work, *args, **kwargs)

    return wait
