"""Verification of plans whose workers train alone: one process plays all of them."""

from typing import Any

import pytest
import torch

from synchromesh.training.workers import Workers
from synchromesh.verify.verify import cast, verify
from tests.ranks import run
from tests.targets import target
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")


def verified(name: str, plan: str, steps: int) -> dict[str, Any]:
    return verify(target(name), plan, steps)


def document(name: str, plan: str, steps: int, ranks: int = 4) -> dict[str, Any]:
    job = target(name)
    model, example = job.model().double(), cast(job.example(), torch.float64)
    with shared(name, model, job.loss, example, plan, ranks=ranks):
        found: dict[str, Any] = run(ranks, verified, name, plan, steps, timeout=110)[0]
    return found


@pytest.mark.wide(6)
@pytest.mark.parametrize("name", ["cnn", "bert", "lstm"])
@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2"])
@pytest.mark.parametrize("word", ["local", "diloco"])
def test_workers_are_proved_by_one_process(name: str, plan: str, word: str) -> None:
    found = document(name, f"{plan}; @synchronisation={word}:2", 5)
    assert found["passed"], found["faults"]
    assert not found["exact"] and found["oracle"] == "simulated workers"
    assert "train alone for 2 steps" in found["reason"]
    assert ("outer optimizer" in found["reason"]) == (word == "diloco")
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
    assert found["sent_bytes_compared"]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_workers_have_stages(schedule: str) -> None:
    plan = f"pipeline:stages=2,microbatches=3; @schedule={schedule}; @synchronisation=local:2"
    found = document("cnn", plan, 5)
    assert found["passed"], found["faults"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]


def test_a_mean_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workers, "take_means", lambda self, states=False: None)
    found = document("cnn", "data; @synchronisation=local:2", 4, 2)
    assert not found["passed"]
    assert {fault["kind"] for fault in found["faults"]} >= {"gradient", "parameter"}
