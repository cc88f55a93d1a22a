"""Random chains of operators on real and complex values, partitioned at random, row by row.

A rank's block may have one row and its part of a dim one entry, so that whatever an operator
reads from a size at run time shows: the mean over single rows must be what eager PyTorch computes
of all.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace
from synchromesh.values.layout import Layout
from tests.local_run import assembled, placements, run
from tests.random_placements import random_partition

ROWS, WIDTH, STEPS, CHAINS = 3, 8, 5, 12


def spectrum(x: Tensor, dim: int, chance: random.Random) -> Tensor:
    kinds = ("fft", "ifft") if x.is_complex() else ("fft", "ifft", "rfft", "ihfft")
    made: Tensor = getattr(torch.fft, chance.choice(kinds))(x, dim=dim, norm="ortho")
    return made


def parts(x: Tensor, dim: int, chance: random.Random) -> Tensor:
    """`x` cut along `dim` in one of the ways that count entries, and put together otherwise."""
    size = x.shape[dim]
    at = sorted(chance.randint(0, size) for _ in range(2))
    pieces = chance.choice(
        [
            lambda: x.tensor_split(at, dim),
            lambda: x.tensor_split([at[0] - size] if at[0] < size else [size], dim),
            lambda: x.tensor_split(chance.randint(1, 4), dim),
            lambda: x.chunk(chance.randint(1, 4), dim),
            lambda: x.split(chance.randint(1, size), dim),
        ]
    )()
    return torch.cat([p * (1 + i / 4) for i, p in enumerate(pieces)][::-1], dim)


def step(model: "Chains", x: Tensor, chance: random.Random) -> Tensor:
    """One operator, or a few that belong together, on [rows, .., n]."""
    if x.dim() == 1:
        return x.unsqueeze(1)
    dim = chance.randrange(1, x.dim())
    size, last = x.shape[dim], x.shape[-1]
    found: list[Any] = [
        lambda: spectrum(x, dim, chance),
        lambda: parts(x, dim, chance),
        lambda: x.unsqueeze(dim).squeeze(),
        lambda: x.unsqueeze(dim).mul(2).unsqueeze_(1).squeeze_() / 2,
        lambda: x.squeeze(dim).squeeze(0) + 0.5,
        lambda: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]).mul(model.real[:2].mean()).sum(1),
        lambda: x.roll(1, dim) + x.flip(dim),
        lambda: x.narrow(dim, 0, size).narrow(dim, -size, size) * x,
        lambda: x[..., : (last + 1) // 2].repeat_interleave(2, -1),
        lambda: nn.functional.pad(x, (1, 1)),
        lambda: x.unflatten(dim, (-1, 2)).transpose(dim, dim + 1) if size % 2 == 0 else x,
        lambda: x.flatten(1),
        lambda: x * model.real[:last].type_as(model.real.view(1, 1, -1)),
        lambda: torch.complex(model.real[:last] * x.real, x.abs() if x.is_complex() else x),
        lambda: x * model.phase[:last],
        lambda: x @ model.mixing[:last] if x.is_complex() else x @ model.mixing[:last].real,
        lambda: nn.functional.linear(x + 0j, model.mixing[:, :last]),
    ]
    if x.is_complex():
        found += [
            lambda: x.real - x.imag,
            lambda: x.conj().imag + x.real,
            lambda: x.conj() * model.phase[:last],
            lambda: x.conj().resolve_conj() + x.mul(1j),
            lambda: torch.view_as_real(x.conj().resolve_conj()).flatten(-2),
            lambda: x.abs(),
            lambda: torch.fft.irfft(x, dim=dim, n=4, norm="ortho"),
        ]
    elif last % 2 == 0:
        found.append(lambda: torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()))
    made: Tensor = chance.choice(found)()
    return made


class Chains(nn.Module):
    """Several chains side by side, each drawn by its own seed, on what a layer makes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seeds = range(seed * CHAINS, (seed + 1) * CHAINS)
        self.first = nn.Linear(6, WIDTH)
        self.real = nn.Parameter(torch.rand(64))
        self.phase = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.mixing = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        total = h.new_zeros(())
        for seed in self.seeds:
            chance, y = random.Random(seed), h
            for _ in range(STEPS):
                if y[0].numel() <= 64:
                    y = step(self, y, chance)
            total = total + torch.tanh(y.abs() if y.is_complex() else y).flatten(1).sum(1)
        return total


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).mean()
    return value


@pytest.mark.wide(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_chains_row_by_row(seed: int) -> None:
    torch.manual_seed(seed)
    model = Chains(seed)._apply(lambda p: p.to(torch.promote_types(p.dtype, torch.float64)))
    batch = torch.randn(ROWS, 6, dtype=torch.float64)
    expected = loss(model, batch)
    wanted = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True),
            strict=True,
        )
    )
    traced = trace(model, loss, batch, training=True)
    assert not traced.opaque, traced.reason
    m = 2 + seed % 3
    layouts = [Layout(1, m)] * len(traced.chain.components)
    for chance in (None, random.Random(seed)):
        found = random_partition(traced, layouts, 1, chance)
        value, sums = 0.0, {n: torch.zeros_like(g) for n, g in wanted.items()}
        for row in batch.split(1):
            ranks, _ = run(traced, found, model, row)
            value += float(ranks[0][0][0]) / ROWS
            for n, state in placements(found).items():
                if n in sums:
                    sums[n] += assembled([r[1][n] for r in ranks], state) / ROWS
        assert value == pytest.approx(float(expected.detach()), rel=1e-11)
        for n, gradient in wanted.items():
            torch.testing.assert_close(sums[n], gradient, rtol=1e-9, atol=1e-9)
