"""The machine of a run, and the versions that it runs."""

import os
import platform
import socket
from importlib.metadata import version

import torch

from synchromesh.launcher.machine import boot, cores, device_bytes, processor
from synchromesh.results.study import StudyMachine
from synchromesh.runs.events import RankMachine
from synchromesh.values.version import VERSION


def rank_machine(device: torch.device) -> RankMachine:
    """That of this process, which computes on `device`."""
    on_cuda = device.type == "cuda"
    return RankMachine(
        socket.gethostname(), boot(), torch.cuda.get_device_name(device) if on_cuda else "cpu",
        processor(), cores(), torch.get_num_threads(), device_bytes(device), system(),
    )  # fmt: skip


def machine() -> StudyMachine:
    """Processor, cores, memory, accelerators and system of this machine."""
    return StudyMachine(
        processor(), os.cpu_count() or 0, device_bytes(torch.device("cpu")),
        tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())), system(),
    )  # fmt: skip


def system() -> str:
    return f"{platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    """Of what figures may depend on."""
    return {
        "synchromesh": VERSION, "torch": torch.__version__, "python": platform.python_version(),
        "transformers": version("transformers"),
    }  # fmt: skip
