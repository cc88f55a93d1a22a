"""Verification of pipelines without a flush: one process that keeps the versions of weights."""

import pytest
import torch

from synchromesh.engine.stashed_weights import StashedWeights
from synchromesh.workloads.workload import Workload
from tests.targets import target
from tests.verify import test_workers
from tests.verify.test_workers import document

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")


def momentum(family: str) -> Workload:
    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)  # type: ignore[arg-type]

    job = target(family)
    return Workload(job.model, job.loss, sgd, job.train_data, batch_size=12, name=family)


@pytest.mark.wide(2)
@pytest.mark.parametrize(
    ("name", "plan", "word", "lacking"),
    [
        ("vit", "pipeline:stages=4,microbatches=4", "pipedream", "last 3 micro-batches (the"),
        ("cnn", "pipeline:stages=2,microbatches=3", "pipedream; @versions=one", "(all stages)"),
        ("bert", "pipeline:stages=2,tensor=2,microbatches=2", "pipedream-2bw", "step before"),
    ],
)
def test_one_process_keeps_the_versions(
    name: str, plan: str, word: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "vit":
        monkeypatch.setattr(test_workers, "target", momentum)
    found = document(name, f"{plan}; @schedule={word}", 4)
    assert found["passed"], found["faults"]
    assert not found["exact"] and found["oracle"] == "simulated workers"
    assert lacking in found["reason"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
    assert found["staleness"]["max"] == (3 if name == "vit" else 1)


def test_another_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StashedWeights, "_version", lambda self, update: max(0, update - 1))
    found = document("cnn", "pipeline:stages=3,microbatches=4; @schedule=pipedream", 4, 3)
    assert not found["passed"]
    assert {fault["kind"] for fault in found["faults"]} >= {"gradient"}
