"""A function on local ranks, as a notebook would start it."""

import os
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

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


def test_the_rank_that_failed_is_told_and_not_who_lost_it() -> None:
    def fails() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(1)
            raise RuntimeError("connection with rank 1 lost: it has ended")
        try:
            raise KeyError("no such word")
        except KeyError as error:  # its process goes on, as one does that ends late
            get_error_handler().record_exception(error)
            time.sleep(60)

    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed: .*no such word"):
        sm.launch(fails)


def test_named_arguments_go_to_the_function() -> None:
    assert sm.launch(lambda a, k: (a, k), 1, k=2, nproc=1) == (1, 2)


def test_what_cannot_come_back_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 failed.*\(function\) cannot be sent"):
        sm.launch(lambda: lambda: 0, nproc=1)
    with pytest.raises(RuntimeError, match="has ended its process: exit code 3"):
        sm.launch(lambda: sys.exit(3), nproc=1)
    assert sm.launch(lambda: (lambda: 0) if os.environ["RANK"] == "1" else 5) == 5


def test_libraries_are_told_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate, for example, would set as many as there are cores, behind a fork."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sm.launch(lambda: os.environ.get("OMP_NUM_THREADS"), nproc=1) == "1"


def test_what_cannot_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, nproc in ((print, 0), (print, "2"), (3, 2)):
        with pytest.raises(ValueError, match="give a function, and nproc of at least 1"):
            sm.launch(function, nproc=nproc)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(ValueError, match="has begun to use a GPU"):
        sm.launch(print)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="rank 1 of a launch already"):
        sm.launch(print)
