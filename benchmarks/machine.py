"""The machine that a table was measured on, in words."""

import os
import platform
import time

import torch

from synchromesh.profiling.machine import processor


def machine() -> str:
    """Processor, kernel, torch, what else ran on it (load average) and the date."""
    return (
        f"{os.cpu_count()} x {processor()}, {platform.system()} "
        f"{platform.release()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
