"""Random modules, partitioned at random: loss, gradients, and what ranks send."""

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

D, ROWS, LENGTH, LAYERS = torch.float64, 5, 4, 5


class Attention(nn.Module):
    """Heads of two entries over the length."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in self.all(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Apply(nn.Module):
    """A function as a module, with a matrix of [2 x width, width]."""

    def __init__(self, width: int, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * width, width) / width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class Channels(nn.Module):
    """A module that wants channels in front of the length."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


def tied(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w.t()) @ w + F.linear(x, w[1 : w.shape[1] + 1])


def layer(n: int, chance: random.Random) -> tuple[nn.Module, int]:
    """A module from [rows, length, n] to the same with another width, and that width."""
    wide = chance.choice([4, 6, 9, 10, 12])
    groups = chance.choice([g for g in range(1, n + 1) if n % g == 0])
    found: list[tuple[nn.Module, int]] = [
        (nn.Linear(n, wide), wide),
        (nn.Linear(n, wide, bias=False), wide),
        (nn.Sequential(nn.Linear(n, 2 * wide), nn.GLU()), wide),
        (nn.Sequential(nn.Linear(n, wide), nn.GELU(), nn.Linear(wide, n)), n),
        (Channels(nn.Conv1d(n, wide, 3, padding=1)), wide),
        (Channels(nn.Conv1d(n, 2 * groups, 3, padding=1, groups=groups)), 2 * groups),
        (Channels(nn.GroupNorm(groups, n, affine=chance.random() < 0.7)), n),
        (Channels(nn.InstanceNorm1d(n, affine=True)), n),
        (Channels(nn.BatchNorm1d(n, affine=chance.random() < 0.7)), n),
        (nn.LayerNorm(n), n),
        (nn.RMSNorm(n), n),
        (nn.Softmax(-1), n),
        (Apply(n, tied), n),
        (Apply(n, lambda x, w: x + w.chunk(2)[1].mean(0) * x.cumsum(-1)), n),
        (Apply(n, lambda x, w: (x[..., None, :] * w).logsumexp(-1)), 2 * n),
        (Apply(n, lambda x, w: torch.cat([x, F.linear(x, w)], -1)), 3 * n),
        (Apply(n, lambda x, w: torch.take_along_dim(x, x.argsort(-1), -1) * w[0]), n),
    ]
    if n % 2 == 0:
        found += [(Attention(n), n), (nn.GLU(), n // 2)]
    module, width = chance.choice(found)
    return (module, width) if 2 <= width <= 24 else (nn.Linear(n, 6), 6)


class Random(nn.Module):
    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=chance.choice([None, 2]))
        self.layers, width = nn.ModuleList(), 6
        for _ in range(LAYERS):
            made, width = layer(width, chance)
            self.layers.append(made)
        self.head = nn.Linear(width, 9)
        self.residual = chance.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        for each in self.layers:
            made = each(y)
            y = y + made if self.residual and made.shape == y.shape else made
        return self.head(y)  # type: ignore[no-any-return]


LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten()),
    lambda y, x: F.cross_entropy(y.flatten(0, 1), x.flatten(), label_smoothing=0.1),
    lambda y, x: y.logsumexp(-1).square().mean() - y.softmax(-1)[..., 0].mean(),
    lambda y, x: F.smooth_l1_loss(y, F.one_hot(x, 9).to(y.dtype)),
)


@pytest.mark.parametrize("seed", range(12))
def test_random_modules(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model, how = Random(chance).double(), chance.choice(LOSSES)
    batch = torch.randint(0, 9, (ROWS, LENGTH))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return how(model(batch), batch)

    expected = loss(model, batch)
    wanted = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    step = trace(model, loss, batch, training=True)
    assert not step.opaque, step.reason
    for layout, drawn in ((Layout(1, 2), chance), (Layout(1, 3), chance if seed % 2 else None)):
        found = random_partition(step, [layout] * len(step.chain.components), ROWS, drawn)
        ranks, groups = run(step, found, model, batch)
        states = placements(found)
        for outputs, _, _ in ranks:
            torch.testing.assert_close(outputs[0], expected.detach(), rtol=1e-10, atol=1e-10)
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            if name in states:
                mine = assembled([r[1][name] for r in ranks], states[name])
                torch.testing.assert_close(mine, gradient, rtol=1e-9, atol=1e-9)
        said: dict[str, int] = {}
        for x in (x for c in found.components for x in c.collectives):
            said[x.kind] = said.get(x.kind, 0) + sent_bytes(x.kind, x.payload(ROWS), x.ranks)
        assert all(dict(group.sent) == said for group in groups)
