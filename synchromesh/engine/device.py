"""The device of a rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def device_of(device: torch.device | str | None, rank: int) -> torch.device:
    """The device of a rank: as given, else the GPU of its LOCAL_RANK, else the CPU."""
    try:
        chosen = torch.device(device) if device is not None else None
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{device!r} names no device: give 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen is None:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type != "cuda":
        return chosen
    if chosen.index is None:
        local, count = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
        if local >= count:
            raise ValueError(
                f"local rank {local} has no GPU of its own ({count} on this machine); start at "
                f'most {count} processes here, or ask for device="cpu"'
            )
        chosen = torch.device("cuda", local)
    torch.cuda.set_device(chosen)
    return chosen


def emulated(device: torch.device, autocast: torch.dtype | None) -> str:
    """A sentence where the device, which is the current one, has no units for bfloat16."""
    if autocast != torch.bfloat16 or device.type != "cuda":
        return ""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    return (
        f"{torch.cuda.get_device_name(device)} has no units for bfloat16 and emulates it, slower "
        "than float32 would be: leave autocast=torch.bfloat16 (--bf16) out"
    )


class EarlyReads:
    """Numbers that are read from a device while it goes on with what it was given after them.

    A copy to the host waits for all that its stream was given before: it has a stream of its own
    here, which waits for what was given before `mark` alone, so that the device does not run out
    of work. On an H100 a step that was waited for to its end took 5 to 17 % longer than a plain
    loop's (benchmarks/README.md)."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is read or computed inside waits for `mark`, not for what was given since."""
        with torch.cuda.stream(self._stream):  # of None: as without
            yield

    def handed(self, x: Tensor) -> Tensor:
        """x, which was computed while reading, for what follows."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            x.record_stream(current)
        return x
