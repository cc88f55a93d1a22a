"""Verification of sums that come late: one process steps by the gradients of some steps before."""

import pytest

from synchromesh.engine.late_sums import LateSync
from tests.verify.test_workers import document

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
LATE = "@synchronisation=stale"


@pytest.mark.parametrize("name", ["cnn", "bert", "lstm"])
@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2"])
def test_late_sums_are_proved_by_one_process(name: str, plan: str) -> None:
    found = document(name, f"{plan}; {LATE}:1", 5)
    assert found["passed"], found["faults"]
    assert not found["exact"] and found["oracle"] == "simulated workers"
    assert "of 1 steps before" in found["reason"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]


def test_stages_sum_late() -> None:
    found = document("cnn", f"pipeline:stages=2,microbatches=3; {LATE}:2", 5)
    assert found["passed"], found["faults"]


@pytest.mark.parametrize(("ranks", "steps"), [(1, 2), (2, 3)])
def test_more_steps_late_than_there_are(ranks: int, steps: int) -> None:
    found = document("cnn", f"data; {LATE}:{steps}", 2, ranks)
    assert found["passed"], found["faults"]


def test_a_sum_that_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = LateSync.take

    def lossy(self: LateSync) -> bool:
        found = usual(self)
        if len(self._scales) == 0:  # the last one
            for p in (item.parameter for b in self._buckets for item in b.items):
                p.grad = None if p.grad is None else p.grad * 0
        return found

    monkeypatch.setattr(LateSync, "take", lossy)
    found = document("cnn", f"data; {LATE}:1", 4, 2)
    assert not found["passed"]
