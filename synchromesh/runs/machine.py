"""The machine that a study runs on, the versions that it runs, and how many processes it holds."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

import torch
from torch import nn

from synchromesh.launch.machine import device_bytes, processor
from synchromesh.results.study import StudyMachine
from synchromesh.values.version import VERSION
from synchromesh.workloads.workload import Workload

# Bytes that a rank needs besides its model: 0.2 GB of its own on a CPU beside what forks share,
# 1.5 GB for a CUDA context and its libraries; measured with torch 2.13, rounded up.
PROCESS_BYTES, CUDA_BYTES = 250_000_000, 1_500_000_000
# Times the bytes of parameters: themselves, gradients, two states of the optimizer, and as much
# again for activations and what communication holds; chosen.
COPIES = 8


def machine() -> StudyMachine:
    """Processor, cores, memory, accelerators and system of this machine."""
    count = torch.cuda.device_count()
    return StudyMachine(
        processor(), os.cpu_count() or 0, device_bytes(torch.device("cpu")),
        tuple(torch.cuda.get_device_name(i) for i in range(count)),
        f"{platform.system()} {platform.release()}",
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of what figures may depend on."""
    return {
        "synchromesh": VERSION, "torch": torch.__version__, "python": platform.python_version(),
        "transformers": version("transformers"),
    }  # fmt: skip


def most_processes(workloads: Sequence[Workload], devices: int) -> int:
    """How many ranks may be there at once, most of them waiting for their turn."""
    model = COPIES * max(map(_parameter_bytes, workloads))
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        return devices * max(1, free // (CUDA_BYTES + model))
    return device_bytes(torch.device("cpu")) // (PROCESS_BYTES + model)


def _parameter_bytes(workload: Workload) -> int:
    return sum(p.numel() * p.element_size() for p in built_without_values(workload).parameters())


def built_without_values(workload: Workload) -> nn.Module:
    """Its model, on the meta device where it can be built there."""
    try:
        with torch.device("meta"):
            return workload.build()
    except Exception:  # its constructor reads values, as drop rates by linspace(...).item()
        return workload.build()
