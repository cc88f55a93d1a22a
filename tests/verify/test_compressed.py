"""Verification of plans that compress gradients: the compressors of all ranks in one process."""

import pytest
import torch

from synchromesh.engine.gradient_buckets import CompressedBucket
from tests.verify.test_workers import document

LAUNCH, COLLECT = CompressedBucket.launch, CompressedBucket.collect
pytestmark = pytest.mark.filterwarnings("ignore:nothing of")


def proved(name: str, plan: str, steps: int = 5, ranks: int = 4) -> None:
    found = document(name, plan, steps, ranks)
    assert found["passed"], found["faults"]
    assert not found["exact"] and found["oracle"] == "simulated workers"
    assert "sent with a loss" in found["reason"]
    assert found["max_compressed_deviation"] < 1e-10
    if "powersgd" not in plan:  # bytes, in one order
        assert found["max_compressed_deviation"] == 0.0
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
    assert found["sent_bytes_compared"]


WORDS = ("fp16", "int8", "onebit", "topk:0.01", "powersgd:2")
PLANS = ("data", "hybrid:tensor=2")
CASES = [  # all of one model, and each word with another one
    *(("cnn", plan, word) for plan in PLANS for word in WORDS),
    ("bert", "data", "fp16"), ("bert", "hybrid:tensor=2", "int8"), ("bert", "data", "powersgd:2"),
    ("lstm", "hybrid:tensor=2", "onebit"), ("lstm", "data", "topk:0.01"),
]  # fmt: skip


@pytest.mark.wide(5)
@pytest.mark.parametrize(("name", "plan", "word"), CASES)
def test_compressors_are_proved_by_one_process(name: str, plan: str, word: str) -> None:
    proved(name, f"{plan}; @compression={word}")


@pytest.mark.wide(2)
@pytest.mark.parametrize("word", ["int8", "topk:0.05", "powersgd:2", "hidden:powersgd:1,*:onebit"])
def test_stages_compress(word: str) -> None:
    proved("cnn", f"pipeline:stages=2,microbatches=3; @compression={word}")


def test_two_compressors_are_proved() -> None:
    proved("bert", "data; @compression=classifier:powersgd:1,*:int8", ranks=3)


def test_sums_in_another_order_are_no_fault() -> None:
    """Small directions of a matrix have the rounding of its large ones."""
    proved("cnn", "data; @compression=powersgd:4", steps=20)


def forgetful(bucket: CompressedBucket) -> None:
    bucket.compressor.owe(torch.zeros_like(bucket.numbers))
    LAUNCH(bucket)


def test_a_rank_that_forgets_what_it_owes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompressedBucket, "launch", forgetful)
    found = document("cnn", "data; @compression=int8", 3, 2)
    assert not found["passed"]
    assert {fault["kind"] for fault in found["faults"]} == {"compressed"}


def doubled(bucket: CompressedBucket) -> None:
    COLLECT(bucket)
    bucket.numbers.mul_(2)


def test_gradients_that_are_wrong_before_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompressedBucket, "collect", doubled)
    found = document("cnn", "data; @compression=int8", 3, 2)
    assert {fault["kind"] for fault in found["faults"]} == {"gradient"}
