"""Models that no device holds: what is estimated of them beside sums by hand."""

import dataclasses

import pytest
import torch

from benchmarks.llama import LLAMA_7B, TOKENS, adamw, loss
from synchromesh import catalogue
from synchromesh.planning.offline import quickest
from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout

SMALL = dataclasses.replace(LLAMA_7B, layers=4)


def test_the_sizes_of_the_paper() -> None:
    assert LLAMA_7B.parameters == pytest.approx(6.738e9, rel=1e-3)


@pytest.mark.slow
def test_bytes_agree_with_sums_by_hand() -> None:
    model, ids = SMALL.model(), torch.zeros(16, TOKENS, dtype=torch.int64)
    assert sum(p.numel() for p in model.parameters()) == SMALL.parameters
    step = trace(model, loss, ids, training=True, autocast=torch.bfloat16)
    cluster = catalogue.cluster("h100x8")
    found = quickest(step, model, adamw, ids, cluster, {"ZeRO 3": ["sharded-data"]})
    most = found["ZeRO 3"].fullest
    assert most is not None and sum(most.by_kind.values()) == pytest.approx(most.peak)
    by_hand = SMALL.by_hand(Layout(8, 1, "parameters"), 16, bf16=True)
    assert most.peak == pytest.approx(by_hand, rel=0.05)
    assert most.by_kind["states"] == pytest.approx(8 * SMALL.parameters / 8, rel=1e-3)
