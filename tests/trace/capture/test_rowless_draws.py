"""Numbers drawn once for all rows of a batch are the same on every rank and in all its pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.training.prepare import prepare
from tests.ranks import run
from tests.traces import shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
D = torch.float64


class Noisy(nn.Module):
    """Noise that scales all rows alike: within a layer, and over a border into the next."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = (self.first(x) * torch.empty(8, dtype=D).bernoulli_(0.5)).tanh()
        noise = torch.randn(8, dtype=D) * self.scale
        return self.head(self.second(h * noise).tanh() * noise)  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return value


def make(rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randn(rows, 4, generator=g, dtype=D)


def trained(plan: str, micro_batches: int) -> tuple[list[float], dict[str, Tensor]]:
    model = Noisy()
    trainer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, make(8), plan)
    assert not trainer.traced.opaque, trainer.traced.reason
    losses = [float(trainer.step(trainer.shard(make(8)), micro_batches)) for _ in range(3)]
    state = trainer.state_dict()
    trainer.close()
    return losses, state


WHOLE = ("tensor; @pieces=1", "tensor; @pieces=4")  # every rank has the rows of a micro-batch
PLANS = (*WHOLE, "data", "tensor; first=data; @pieces=4", "data; second=tensor; @pieces=1")


def test_every_plan_draws_what_one_process_draws() -> None:
    with shared("noisy", Noisy(), loss, make(8), "data", *PLANS, ranks=2):
        for micro_batches, plans in ((1, PLANS), (2, WHOLE)):
            ((expected, weights),) = run(1, trained, "data", micro_batches)
            for plan in plans:
                for losses, state in run(2, trained, plan, micro_batches):
                    assert losses == pytest.approx(expected, rel=1e-12), plan
                    for name, tensor in weights.items():
                        torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-12)


def test_micro_batches_draw_anew() -> None:
    with shared("noisy", Noisy(), loss, make(8), "data"):
        ((one, _),) = run(1, trained, "data", 1)
        ((two, _),) = run(1, trained, "data", 2)
    assert one != pytest.approx(two, rel=1e-6)
