"""The device of a rank."""

import os

import torch


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
