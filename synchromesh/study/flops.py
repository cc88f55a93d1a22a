"""Model FLOPs utilisation of a study's runs, where the catalogue knows the devices' peak."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from synchromesh.results.run import RunResult
from synchromesh.runs.flops import flops_utilisation, step_flops
from synchromesh.workloads.workload import Workload

ROWS = 2  # of the batch whose operations are counted


def row_flops(workload: Workload) -> float:
    """Operations of forward and backward of one row of the unsharded model."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if workload.carry is None:
            return workload.loss(model, batch)
        return workload.loss(model, batch, workload.carry(ROWS))[0]

    return step_flops(workload.build(), loss, workload.example(ROWS)) / ROWS


def with_flops(
    runs: Sequence[RunResult], workloads: Mapping[str, Workload], device: str | None, bf16: bool
) -> list[RunResult]:
    """The runs with their `flops_utilisation`. device: the name of the GPU that each rank ran on;
    None where they ran on CPUs, of which no peak is known."""
    if device is None:
        return list(runs)
    dtype = "bfloat16" if bf16 else "float32"
    flops = {name: row_flops(workload) for name, workload in workloads.items()}

    def one(run: RunResult) -> RunResult:
        if run.step_seconds is None or run.predicted:
            return run
        step, median = flops[run.workload] * run.batch, run.step_seconds.median
        used = flops_utilisation(step, median, device, run.devices, dtype)
        return replace(run, flops_utilisation=used)

    return [one(run) for run in runs]


def gpu() -> str | None:
    """The name of the GPU that ranks run on here, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
