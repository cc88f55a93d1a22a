"""The clock that programs are timed with: the processor's where one thread computes."""

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float] | None:
    """The processor's clock, where one thread computes: what a quota or another process takes is
    not in it. None where time on the wall is all there is."""
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time
    return None
