"""Operations of models whose products can be counted by hand."""

import pytest
import torch
from torch import nn

from synchromesh.runs.flops import flops_utilisation, peak_flops, step_flops


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
