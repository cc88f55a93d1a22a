"""Operations of models whose products can be counted by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from synchromesh.results.run import Quartiles, RunResult
from synchromesh.runs.flops import (
    flops_utilisation,
    peak_flops,
    row_flops,
    step_flops,
    with_flops,
)
from synchromesh.workloads.workload import Workload

WORKLOAD = Workload(
    model=lambda: nn.Linear(32, 64, bias=False), loss=lambda m, b: m(b).mean(), name="w",
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=[torch.ones(32)] * 8, batch_size=4,
)  # fmt: skip


def test_operations_of_a_linear_model() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    x = torch.ones(7, 10)
    forward = 2 * 7 * (10 * 20 + 20 * 3)
    backward = 2 * forward - 2 * 7 * 10 * 20  # no gradient of the batch
    assert step_flops(model, lambda m, b: m(b).sum(), x) == forward + backward
    assert all(p.grad is None for p in model.parameters())
    weighted = step_flops(model, lambda m, b: (m(b).sum(), len(b)), x[:1])
    assert weighted * 7 == forward + backward


def test_part_of_the_peak() -> None:
    peak = peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    assert peak == pytest.approx(989e12, rel=0.01)
    assert peak_flops("Tesla V100-SXM2-16GB", "float32") is not None
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") is None, "has a lower peak"
    assert peak_flops("cpu", "float32") is None and peak_flops("NVIDIA H100", "int4") is None
    used = flops_utilisation(peak * 0.8, 2.0, "NVIDIA H100 80GB HBM3", 2, "bfloat16")
    assert used == pytest.approx(0.2)
    assert flops_utilisation(1.0, 1.0, "cpu", 1, "float32") is None


def test_a_row_of_a_linear_layer() -> None:
    """A product forward and one for the weight's gradient; the input needs none."""
    assert row_flops(WORKLOAD) == 2 * 2 * 32 * 64
    carrying = replace(
        WORKLOAD, loss=lambda m, b, c: (m(b).mean(), c), carry=lambda rows: torch.zeros(rows, 1)
    )
    assert row_flops(carrying) == 2 * 2 * 32 * 64


def test_measured_runs_have_their_part_of_the_peak() -> None:
    run = RunResult("w", "data", 2, 4, 0, "done", step_seconds=Quartiles(1e-3, 1e-3, 1e-3))
    guessed, failed = replace(run, predicted=True), replace(run, step_seconds=None)
    found = with_flops([run, guessed, failed], {"w": WORKLOAD}, "Tesla V100-SXM2-16GB", False)
    flops = 2 * 2 * 32 * 64 * 4 / 1e-3
    assert found[0].flops_utilisation == pytest.approx(flops / (2 * 15.7e12))
    assert found[1:] == [guessed, failed]
    assert with_flops([run], {"w": WORKLOAD}, None, False) == [run]
