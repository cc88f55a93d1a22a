"""The law of placement rules on operators with random shapes, dims, places and types."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rule_law import check

aten = torch.ops.aten
Case = tuple[Any, tuple[Any, ...]]


class Draw:
    """Random shapes and tensors; the shape, a dim of it (maybe negative) and its length."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.shape = [
            self.chance.choice((1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(self.below(1, 4))
        ]
        self.n = len(self.shape)
        self.dim = self.below(-self.n, self.n - 1)
        self.length = self.shape[self.dim]
        self.complex = self.chance.random() < 0.5

    def below(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def maybe(self, *choices: Any) -> Any:
        return self.chance.choice(choices)

    def tensor(self, *shape: int, complex: bool | None = None) -> Tensor:
        kind = self.complex if complex is None else complex
        dtype = torch.complex128 if kind else torch.float64
        return torch.randn(shape or tuple(self.shape), dtype=dtype).requires_grad_()

    def broadcast(self) -> Tensor:
        """A tensor that broadcasts to the shape, of its type or the other."""
        tail = self.shape[self.below(0, self.n - 1) :]
        sizes = (1 if self.chance.random() < 0.3 else n for n in tail)
        return self.tensor(*sizes, complex=self.maybe(True, False))

    def along(self, *sizes: int) -> list[int]:
        """The shape with other sizes along the dim."""
        at = self.dim % self.n
        return [*self.shape[:at], *sizes, *self.shape[at + 1 :]]


def of_numbers(d: Draw) -> Iterator[Case]:
    """Elementwise operators, transforms, products and reductions."""
    x, z = d.tensor(), d.tensor(complex=True)
    for op in (aten.real, aten.imag, aten._conj, aten.resolve_conj, aten.abs, aten.angle):
        yield op.default, (z,)
    yield aten.view_as_real.default, (z,)
    yield aten.view_as_complex.default, (d.tensor(*d.shape, 2, complex=False),)
    yield aten.complex.default, (d.tensor(complex=False), d.tensor(complex=False))
    for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        yield op, (x, d.broadcast())
    yield aten.where.self, (torch.rand(d.shape) > 0.5, x, d.tensor())
    yield aten.fft_fft.default, (x, d.maybe(None, 3), d.dim, d.maybe(None, "ortho"))
    yield aten.fft_rfft.default, (d.tensor(complex=False), None, d.dim)
    yield aten.fft_irfft.default, (z, d.below(2, 5), d.dim)
    yield aten.fft_fftn.default, (x, d.maybe(None, [3]))
    yield aten.fft_fftshift.default, (x, d.maybe(None, [d.dim]))
    b, i, j, k = (d.maybe(1, 2, 4, 5, 6) for _ in range(4))
    yield aten.matmul.default, (d.tensor(b, i, k), d.tensor(d.maybe(1, b), k, j))
    yield aten.linear.default, (d.tensor(b, i, k), d.tensor(j, k), d.tensor(j))
    yield aten.sum.dim_IntList, (x, [d.dim], d.maybe(True, False))
    yield aten.mean.dim, (x, [d.dim], d.maybe(True, False))
    yield aten.cumsum.default, (x, d.dim)


def of_places(d: Draw) -> Iterator[Case]:
    """Operators that count or rearrange entries along a dim."""
    x, dim, length = d.tensor(), d.dim, d.length
    at = [d.below(-length, length + 1) for _ in range(d.below(1, 3))]
    even = sorted(2 * d.below(0, length // 2) for _ in at)
    for places in (at, sorted(at), even):
        yield aten.tensor_split.indices, (x, places, dim)
    yield aten.tensor_split.sections, (x, d.below(1, 5), dim)
    yield aten.chunk.default, (x, d.below(1, 6), dim)
    yield aten.split.Tensor, (x, d.below(1, length + 1), dim)
    first = d.below(0, length)
    yield aten.split_with_sizes.default, (x, [first, length - first], dim)
    start, stop = d.maybe(None, 0, first, -first), d.maybe(None, length, length + 3, -1, 2**63 - 1)
    yield aten.slice.Tensor, (x, dim, start, stop, d.maybe(1, 2))
    first = d.below(0, length - 1)
    yield aten.narrow.default, (x, dim, first, d.below(0, length - first))
    yield aten.narrow.default, (x, dim, -length, length)
    yield aten.select.int, (x, dim, d.below(-length, length - 1))
    yield aten.unbind.int, (x, dim)
    yield aten.roll.default, (x, [d.below(-3, 3)], d.maybe([], [dim]))
    yield aten.flip.default, (x, [dim])
    pads = [d.below(0, 2) for _ in range(2 * d.below(1, d.n))]
    yield aten.pad.default, (x, pads, "constant", d.maybe(None, 0.0, 1.5))
    yield aten.repeat.default, (x, [d.below(1, 3) for _ in range(d.n + d.below(0, 1))])
    yield aten.repeat_interleave.self_int, (x, d.below(1, 3), dim)
    yield aten.squeeze.default, (x,)
    yield aten.squeeze.dim, (x, dim)
    yield aten.squeeze.dims, (x, [dim])
    yield aten.unsqueeze.default, (x, d.below(-d.n - 1, d.n))
    yield aten.expand.default, (x, [d.maybe(2, 4) if n == 1 else d.maybe(-1, n) for n in d.shape])
    yield aten.cat.default, ([x, d.tensor(*d.along(d.maybe(2, 4)))], dim)
    yield aten.stack.default, ([x, d.tensor()], d.below(-d.n - 1, d.n))
    yield aten.reshape.default, (x, d.maybe([-1], [d.shape[0], -1]))
    yield aten.unfold.default, (x, dim, 1, 2)
    yield aten.diagonal.default, (d.tensor(*d.shape, 2),)
    if d.n > 1:
        yield d.maybe(aten.tril, aten.triu).default, (x, d.below(-2, 2))
        yield aten.adjoint.default, (x,)
    index = torch.randint(0, length, d.along(d.below(1, 4)))
    yield aten.gather.default, (x, dim, index)
    yield aten.take_along_dim.default, (x, index, dim)
    yield aten.take_along_dim.default, (x, index)
    yield aten.index_select.default, (x, dim, index.flatten()[:3])


@pytest.mark.parametrize("cases", [of_numbers, of_places])
def test_rules_keep_the_law_for_random_arguments(cases: Callable[[Draw], Iterator[Case]]) -> None:
    for seed in range(8):
        for number, (op, args) in enumerate(cases(Draw(seed))):
            try:
                check(op, args, m=2 + (seed + number) % 4)
            except Exception as error:
                given = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args]
                error.add_note(f"seed {seed}: {op} of {given}")
                raise
