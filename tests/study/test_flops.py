"""Model FLOPs utilisation: operations of a row times rows over the peak, of runs that were."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from synchromesh.results.run import Quartiles, RunResult
from synchromesh.study.flops import row_flops, with_flops
from synchromesh.workloads.workload import Workload

WORKLOAD = Workload(
    model=lambda: nn.Linear(32, 64, bias=False), loss=lambda m, b: m(b).mean(), name="w",
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=[torch.ones(32)] * 8, batch_size=4,
)  # fmt: skip


def test_a_linear_layer() -> None:
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
