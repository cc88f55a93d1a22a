"""Merged rows at borders between components of other data degrees: any plan trains like one
process, whether a value crosses or the model trains as one component."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.training.prepare import prepare
from tests.ranks import run
from tests.traces import shared

Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three linears and what `body` makes of them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.body(self, x))  # type: ignore[no-any-return]


def doubled(net: Net, x: Tensor) -> Tensor:
    p, q = net.b(torch.cat([net.a(x), net.a(x.flip(-1))], 0)).tanh().chunk(2, 0)
    return p * q.exp()


def stacked(net: Net, x: Tensor) -> Tensor:
    h = net.b(torch.vstack([net.a(x), net.a(x).sin(), x])).tanh()
    return h[: x.shape[0]] * h[-x.shape[0] :]


def tiled(net: Net, x: Tensor) -> Tensor:
    h = net.b(torch.cat([net.a(x).tile(2, 1), x], 0)).tanh()
    return h.unflatten(0, (3, -1)).cumsum(0)[2]


def interleaved(net: Net, x: Tensor) -> Tensor:
    h = net.b(torch.cat([net.a(x), x], 0).repeat_interleave(2, 0)).tanh()
    return h[::2].chunk(2, 0)[0] * h[1::2].chunk(2, 0)[1]


def tokens(net: Net, x: Tensor) -> Tensor:
    """(rows * tokens, width) twice, one behind the other."""
    t = x.view(-1, 3, 2).repeat(1, 1, 3).flatten(0, 1)
    h = net.b(torch.cat([net.a(t), t], 0)).tanh()
    p, q = h.split(h.shape[0] // 2, 0)
    return (p * q.exp()).view(-1, 3, 6).sum(1)


def halved(net: Net, x: Tensor) -> Tensor:
    h = net.a(torch.cat([x, x.sin()], 0)).chunk(2, 0)[1]
    return net.b(torch.cat([h.tanh(), h], 0)).chunk(2, 0)[0]


def turned(net: Net, x: Tensor) -> Tensor:
    """Flipped twice: in order again, which nobody proves."""
    return net.b(net.a(x).flip(0)).tanh().flip(0)


def swapped(net: Net, x: Tensor) -> Tensor:
    """The halves exchange places; the rows in them stay."""
    h = net.b(torch.cat([net.a(x), x], 0).roll(x.shape[0], 0)).tanh()
    return h[: x.shape[0]] + h[x.shape[0] :] * 2


CROSSING = {
    "doubled": doubled, "stacked": stacked, "tiled": tiled, "interleaved": interleaved,
    "tokens": tokens, "halved": halved, "swapped": swapped,
}  # fmt: skip
BODIES = {**CROSSING, "turned": turned}
PLANS = {
    2: ("data; b=tensor", "tensor; b=data"),
    3: ("data; a=tensor; c=tensor",),
}


def asked(size: int) -> list[tuple[str, str]]:
    """Names and plans; what trains as one component knows data layouts only."""
    crossing = [(name, plan) for name in CROSSING for plan in PLANS[size]]
    return [*crossing, *((name, "data") for name in BODIES if name not in CROSSING)]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return (out.square().mean(1) + out.sum(1).sin() * batch[:, 0]).mean()


def batch(rows: int) -> Tensor:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, generator=g, dtype=torch.float64)


def model(name: str) -> Net:
    torch.manual_seed(0)
    return Net(BODIES[name]).double()


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    net = model(name)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for rows in (12, 7):
        value = loss(net, batch(rows))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, net.state_dict()


def planned(size: int) -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]:
    found = {}
    for name, plan in asked(size):
        with shared(name, model(name), loss, batch(12), plan):
            net = model(name)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            trainer = prepare(net, optimizer, loss, batch(12), plan)
            losses = [trainer.step(trainer.shard(batch(rows))).item() for rows in (12, 7)]
            found[name, plan] = losses, trainer.state_dict()
            trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the model runs whole on every device")
@pytest.mark.filterwarnings("ignore:nothing of")
@pytest.mark.filterwarnings("ignore:rows depend on each other")
@pytest.mark.parametrize("size", PLANS)
def test_merged_rows_cross_borders_in_order(size: int) -> None:
    for name, plan in asked(size):
        with shared(name, model(name), loss, batch(12), plan, ranks=size):
            pass  # traced here, for all ranks
    for answer in run(size, planned, size, timeout=110):
        for (name, plan), (losses, state) in answer.items():
            expected, trained = alone(name)
            assert losses == pytest.approx(expected, rel=1e-10), (name, plan)
            for key, tensor in trained.items():
                assert torch.allclose(state[key], tensor, rtol=1e-10, atol=1e-12), (name, plan)


@pytest.mark.parametrize("name", BODIES)
def test_what_is_proved_crosses_and_what_is_not_says_why(name: str) -> None:
    step = trace(model(name), loss, batch(12), training=True)
    assert not step.opaque and bool(step.merged) == (name not in CROSSING)
    if step.merged:
        assert "has rows that depend on each other (flip along dimension 0" in step.merged
        assert "test_row_borders.py:" in step.merged
