"""The machine that a table was measured on, in words."""

import os
import platform
import time
from pathlib import Path

import torch


def machine() -> str:
    """Processor, kernel, torch, what else ran on it (load average) and the date."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{os.cpu_count()} x {models[0] if models else platform.machine()}, {platform.system()} "
        f"{platform.release()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
