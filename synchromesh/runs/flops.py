"""Floating-point operations of a training step, and the part of a device's peak that they are.

    model FLOPs utilisation = operations of the model for a step / (seconds x peak of the devices)

(Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B): operations of forward and backward as
the unsharded model needs them, whatever a plan computes twice."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from synchromesh.catalogue.sheet import sheets
from synchromesh.results.run import RunResult
from synchromesh.trace.capture.outputs import named
from synchromesh.workloads.workload import Workload

SLOWER_FORMS = {"pcie", "nvl"}  # words of names of devices that have a sheet of their own or none


def step_flops(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> int:
    """Operations (a multiplication and an addition are two) of forward and backward of `batch` on
    the unsharded `model`, by torch's formulas for products, convolutions and attention."""
    with FlopCounterMode(display=False) as counter:
        total, *_ = named(loss(model, batch)).values()
        total.backward()
    model.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def flops_utilisation(
    flops: float, seconds: float, device: str, count: int, dtype: str
) -> float | None:
    """The part of the peak of `count` devices, if the catalogue has it. flops: of a step. device:
    a GPU's name, as torch.cuda.get_device_name has it. dtype: as the catalogue names it."""
    peak = peak_flops(device, dtype)
    return None if peak is None or seconds <= 0 else flops / (seconds * count * peak)


def peak_flops(device: str, dtype: str) -> float | None:
    """Peak operations a second of a GPU; None: no sheet, as of the slower PCIe forms of most."""
    words = re.split(r"[\s_-]+", device.lower())
    slower = SLOWER_FORMS & set(words)
    for name, sheet in sheets().devices.items():
        parts = re.split(r"[_-]+", name.lower())
        if parts[0] in words and slower <= set(parts):
            figure = sheet.peak_flops.get(dtype)
            return None if figure is None else figure.value
    return None


def row_flops(workload: Workload, rows: int = 2) -> float:
    """Operations of forward and backward of one row of the unsharded model, counted of `rows`."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if workload.carry is None:
            return workload.loss(model, batch)
        return workload.loss(model, batch, workload.carry(rows))[0]

    return step_flops(workload.build(), loss, workload.example(rows)) / rows


def with_flops(
    runs: Sequence[RunResult], workloads: Mapping[str, Workload], device: str | None, bf16: bool
) -> list[RunResult]:
    """The runs with `flops_utilisation`. device: each rank's GPU; None: CPUs, of unknown peak."""
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
