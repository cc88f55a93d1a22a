"""The comparison of a trace with its model: what it costs. What it finds: test_capture.py."""

import torch
from torch import Tensor, nn

from synchromesh.programs.memory import LiveBytes
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.comparison import compare


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_it_takes_no_more_memory_than_training() -> None:
    """AdamW has gradients, two moments and what an update computes with, besides parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    batch = torch.randn(8, 64), torch.randint(64, (8,))
    step = trace(model, loss, batch, training=True)
    parameters = sum(p.nbytes for p in model.parameters())
    with LiveBytes() as live:
        assert compare(model, loss, batch, step).fault is None
    assert 2 * parameters < live.peak < 3.5 * parameters
