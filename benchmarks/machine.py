"""The machine that a table was measured on, in words."""

import os
import platform
import time

import torch

from synchromesh.launcher.machine import processor


def hardware() -> str:
    """Processor, kernel and torch."""
    kernel = platform.release().partition("-")[0]
    return (
        f"{os.cpu_count()} x {processor()}, {platform.system()} {kernel}, "
        f"torch {torch.__version__}"
    )


def machine() -> str:
    """The hardware, what else ran on it (load average) and the date."""
    return f"{hardware()}, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d %H:%M')}"
