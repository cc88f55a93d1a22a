"""The device of a rank: what it lacks."""

import pytest
import torch

from synchromesh.engine.device import emulated


def test_a_gpu_without_units_for_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a V100 at {device}")
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert emulated(gpu, torch.bfloat16).startswith("a V100 at cuda:0 has no units for bfloat16")
    assert emulated(gpu, None) == emulated(cpu, torch.bfloat16) == "" and asked == [False]
