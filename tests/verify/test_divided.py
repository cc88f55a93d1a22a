"""Verification of stages whose backwards are divided: they compute what one process does."""

import pytest

from tests.verify.test_workers import document


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        ("cnn", "pipeline:stages=4,microbatches=5; @schedule=zero-bubble", 4),
        ("cnn", "pipeline:stages=2,microbatches=8; @schedule=zero-bubble-2", 2),
        ("vit", "hybrid:stages=2,tensor=2; @micro_batches=3; @schedule=zero-bubble", 4),
        ("bert", "hybrid:stages=2,tensor=2; @micro_batches=5; @schedule=zero-bubble", 4),
        ("lstm", "pipeline:stages=2,microbatches=4; @schedule=zero-bubble", 2),
        ("gpt2", "pipeline:stages=2,microbatches=4,recompute=yes; @schedule=zero-bubble", 2),
        ("unet", "pipeline:stages=2,microbatches=3; @schedule=zero-bubble", 4),
    ],
)
def test_a_divided_backward_is_exact(name: str, plan: str, ranks: int) -> None:
    found = document(name, plan, 3, ranks)
    assert found["passed"], found["faults"]
    assert found["exact"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
