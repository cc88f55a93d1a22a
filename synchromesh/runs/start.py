"""What the log of a run says before the first step: what was asked, of which machines."""

import os
import platform
import socket
from typing import Any

import torch

from synchromesh.launch.machine import LAB, boot, cores, device_bytes, processor
from synchromesh.runs.layouts import component_layouts
from synchromesh.runs.machine import versions
from synchromesh.runs.run_folder import Job
from synchromesh.training.trainer import Trainer
from synchromesh.values.fields import to_plain


def start_values(job: Job, trainer: Trainer) -> dict[str, Any]:
    """The fields of `start` (docs/runs.md); all ranks call alike."""
    components = trainer.traced.chain.components
    return {
        "workload": job.workload.name, "plan": str(trainer.plan), "ranks": trainer.world.size,
        "seed": job.seed, "batch_size": job.workload.batch_size, "bf16": job.bf16,
        "adapt": job.adapt, "command": list(job.command), "versions": versions(),
        "emulated": bool(os.environ.get(LAB)),
        "parameter_bytes": sum(c.parameter_bytes for c in components),
        "machines": trainer.world.everyone.all_gather_json(_machine(trainer.world.device)),
    }  # fmt: skip


def layout_values(trainer: Trainer) -> dict[str, Any]:
    return {
        "step": trainer.steps,
        "plan": str(trainer.plan),
        "components": to_plain(component_layouts(trainer)),
    }


def _machine(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "boot": boot(),
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": device_bytes(device),
        "system": f"{platform.system()} {platform.release()}",
    }
