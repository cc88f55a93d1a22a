"""What a partition says that ranks send is what they send, whatever the sizes of what moves."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout
from synchromesh.values.traffic import sent_bytes
from tests.local_run import assembled, placements, run
from tests.random_placements import random_partition

D, ROWS, SAMPLES = torch.float64, 5, 6


class Towers(nn.Module):
    """Two embeddings of the same rows, by layers that two, three and four ranks divide apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.right = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "a target": lambda a, b, x: F.mse_loss(a, x[:, :4]),
    "a target that is broadcast": lambda a, b, x: F.l1_loss(a, x[:, :1]),
    "two learned": lambda a, b, x: F.smooth_l1_loss(a, b),
    "rows with rows": lambda a, b, x: F.cross_entropy(a @ b.T, torch.arange(len(x))),
    "pairs of rows": lambda a, b, x: (a[:, None] - b).square().sum(-1).sqrt().mean(),
    "half of the rows": lambda a, b, x: (a - b).square().sum(1).sort()[0][: len(x) // 2].mean(),
    "all but one row": lambda a, b, x: (a[1:] - b[:-1]).abs().mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", LOSSES)
def test_ranks_send_what_is_said(name: str) -> None:
    model = Towers()
    batch = torch.randn(ROWS, 6, dtype=D)

    def loss(model: Any, batch: Tensor) -> Tensor:
        return LOSSES[name](*model(batch), batch)

    expected = loss(model, batch)
    wanted = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    step = trace(model, loss, batch, training=True)
    assert not step.opaque, step.reason
    for seed in range(SAMPLES):
        layout = Layout(1, 2 + seed % 3)
        chance = random.Random(seed) if seed else None
        found = random_partition(step, [layout] * len(step.chain.components), ROWS, chance)
        ranks, groups = run(step, found, model, batch)
        for outputs, _, _ in ranks:
            torch.testing.assert_close(outputs[0], expected.detach(), rtol=1e-11, atol=1e-11)
        states = placements(found)
        for (n, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            if n in states:
                mine = assembled([r[1][n] for r in ranks], states[n])
                torch.testing.assert_close(mine, gradient, rtol=1e-11, atol=1e-11)
        said: dict[str, int] = {}
        moves = [x for c in found.components for x in c.collectives]
        for x in moves:
            said[x.kind] = said.get(x.kind, 0) + sent_bytes(x.kind, x.payload(ROWS), x.ranks)
        for group in groups:
            assert dict(group.sent) == said and group.calls == len(moves)
