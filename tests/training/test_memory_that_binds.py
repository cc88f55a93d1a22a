"""`auto` on live ranks whose memory binds: what it takes trains as one process does."""

import pytest
import torch
from torch import Tensor, nn

import synchromesh as sm
from synchromesh.planner.problem import Headroom
from synchromesh.planning import rank_memory
from tests.ranks import run

ROWS, WIDTH, LAYERS = 2048, 256, 8  # 2 MiB of activations a layer and rank, of parameters 0.25


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def losses(mebibytes: int) -> tuple[str, list[float]]:
    """The plan where a rank has so much besides what is kept, and what it trains; 0: `single`."""
    torch.manual_seed(0)
    layers = [x for _ in range(LAYERS) for x in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model, batch = nn.Sequential(*layers).double(), torch.randn(ROWS, WIDTH).double()
    if mebibytes:
        free = Headroom.RESERVE + mebibytes * 2**20
        rank_memory.free_bytes = lambda share, device: free
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = "auto" if mebibytes else "single"
    trainer = sm.prepare(model, optimizer, squares, batch, plan=plan)
    found = [trainer.step(trainer.shard(batch)).item() for _ in range(3)]
    name = str(trainer.plan)
    trainer.close()
    return name, found


@pytest.mark.slow
def test_micro_batches_save_memory() -> None:
    (_, plain), _ = run(2, losses, 0)
    for name, found in run(2, losses, 20):
        assert "@micro_batches=" in name, name
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=0.0)
