"""A function on local ranks, as a notebook would start it."""

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import synchromesh as sm


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_rank_0s_result_comes_back_of_a_function_that_reads_what_is_here() -> None:
    data = [(torch.randn(6, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(24)]

    def train(plan: str) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        example = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)
        trainer = sm.prepare(model, optimizer, loss, example, plan)
        losses = [float(trainer.step(batch)) for batch in trainer.loader(data, 8)]
        size = trainer.world.size
        trainer.close()
        return losses, size

    both, ranks = sm.launch(train, "data", nproc=2)
    alone, one = sm.launch(train, "single", nproc=1)
    assert (ranks, one) == (2, 1) and both == pytest.approx(alone, rel=1e-5)
    assert "RANK" not in os.environ


def test_a_rank_that_fails_ends_all_and_its_traceback_is_told() -> None:
    def fails() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("no such word")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed: .*in fails.*no such word"):
        sm.launch(fails)
    assert time.monotonic() - began < 30


def test_what_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        sm.launch(print, nproc=0)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="has begun to use a GPU"):
        sm.launch(print)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="rank 1 of a launch already"):
        sm.launch(print)
