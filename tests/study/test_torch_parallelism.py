"""What torch.distributed.pipelining cannot run is refused, not run as something else."""

import pytest
import torch
from torch import nn

from synchromesh.study.torch_parallelism import Answer, Call


def test_a_loss_calls_the_model_once() -> None:
    model, batch = nn.Linear(2, 1), torch.ones(3, 2)

    def once(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch, scale=2).sum()

    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) + model(-batch)).sum()

    call = Call.of(model, once, batch)
    assert call.args == (batch,) and call.kwargs == {"scale": 2}
    assert once(Answer(torch.ones(3)), batch) == 3
    with pytest.raises(
        ValueError, match=r"needs a loss that calls the model once.* calls it again"
    ):
        twice(Answer(torch.ones(3)), batch)
    with pytest.raises(ValueError, match="this one does not call it"):
        Call.of(model, lambda model, batch: batch.sum(), batch)
