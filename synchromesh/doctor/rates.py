"""Rates of one device: floating-point operations and bytes a second, as a rank reaches them."""

import time
from collections.abc import Callable
from statistics import median

import torch

# edges of the products; the last is what counts, the ones before it warm the device up
EDGES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
COPIED = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes
DTYPES = {
    "cpu": {"float32": torch.float32, "bfloat16": torch.bfloat16},
    "cuda": {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16},
}


def flops(device: torch.device, seconds: float) -> dict[str, float]:
    """Achieved rate of large matrix products by dtype; no float16 on a CPU.

    seconds: for each dtype. float32 is as torch is set; where that is TF32 it is TF32's rate."""
    kinds = DTYPES[device.type]
    return {name: _products(device, dtype, seconds) for name, dtype in kinds.items()}


def _products(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    rate = 0.0
    for edge in EDGES[device.type]:
        a = torch.ones(edge, edge, device=device, dtype=dtype)
        b = torch.empty_like(a)
        once = _median(lambda a=a, b=b: torch.mm(a, a, out=b), device, seconds / 3)  # type: ignore[misc]
        rate = 2 * edge**3 / once
        if once > seconds / 3:
            break  # a larger one would take eight times as long
    return rate


def bytes_per_second(device: torch.device, seconds: float) -> float:
    """Rate of a copy in the device's memory, bytes read and written."""
    size = COPIED[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(lambda: target.copy_(source), device, seconds)


def _median(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of a call, of at least three and as many as there is time for."""
    taken: list[float] = []
    _timed(call, device)
    end = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < end:
        taken.append(_timed(call, device))
    return median(taken)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
