"""Names of communications, of the many that PyTorch, gloo and NCCL have for them."""

ANNOTATION = "synchromesh::"  # begins a range that a call of a process group has from us
WAIT = f"{ANNOTATION}wait"  # the range in which a thread waits for a communication
MESSAGES = ("send", "receive")
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "sendrecv": "send_receive",  # one NCCL kernel for both
    "send": "send",
    "recv": "receive",
}
_LONGEST_FIRST = sorted(_NAMES, key=len, reverse=True)


def communication_name(text: str) -> str | None:
    """Our name of a collective or message by a method of a process group (`_allgather_base`), an
    operator (`c10d::allreduce_`), a range (`gloo:recv`) or a kernel
    (`ncclDevKernel_AllReduce_Sum_f32_RING_LL`); None where it is none."""
    last = text.rpartition(":")[2].rpartition("Kernel_")[2]
    plain = last.replace("_", "").lower()
    return next((_NAMES[key] for key in _LONGEST_FIRST if plain.startswith(key)), None)
