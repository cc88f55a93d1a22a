"""Random row programs: chains of operators that take rows apart, put them together, move them.

A program is drawn while it runs on two numbers of rows, so that every size is known to be a number
or a multiple of the rows. `Programs(seed, count)` is a model of `count` of them.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

Move = Callable[[Tensor], Tensor]
MOST = 600  # entries of a value with six rows
FEW, MANY = 6, 10
WIDTH = 16


WEIGHT = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH).sin()


class Drawing:
    """Draws the next operator for a value that is known for two numbers of rows."""

    def __init__(self, chance: random.Random, few: Tensor, many: Tensor) -> None:
        self.chance, self.few, self.many = chance, few, many

    @property
    def rowed(self) -> list[int]:
        pairs = zip(self.few.shape, self.many.shape, strict=True)
        return [d for d, (a, b) in enumerate(pairs) if a != b]

    def any_dim(self) -> int:
        """A dimension, that of the rows more often than others."""
        rows = self.rowed * 3
        return self.chance.choice([*range(self.few.dim()), *rows])

    def size(self, d: int) -> int:
        """Entries along a dimension, for one row where they are rows."""
        return self.few.shape[d] // (FEW if d in self.rowed else 1)

    def draw(self) -> Move:
        return self.chance.choice(KINDS)(self)

    # -- kinds of operators --------------------------------------------------------------

    def cat(self) -> Move:
        d, times = self.any_dim(), self.chance.choice((2, 3))
        return lambda x: torch.cat([x * (i + 1) for i in range(times)], d)

    def stack(self) -> Move:
        d = self.chance.randrange(self.few.dim() + 1)
        return lambda x: torch.stack([x, x.tanh()], d)

    def parts(self) -> Move:
        d = self.any_dim()
        k = self.chance.choice([k for k in (2, 3, 4) if self.size(d) % k == 0] or [1])
        if self.chance.random() < 0.3:
            i = self.chance.randrange(k)
            return lambda x: x.chunk(k, d)[i]
        if self.chance.random() < 0.3:
            return lambda x: torch.cat([y.sin() for y in x.split(x.shape[d] // k, d)][::-1], d)
        return lambda x: x.chunk(k, d)[0] * x.chunk(k, d)[-1].exp().clamp(max=3)

    def swapped(self) -> Move:
        d = self.any_dim()
        k = self.chance.choice([k for k in (2, 3) if self.size(d) % k == 0] or [1])
        return lambda x: x + torch.cat(x.tensor_split(k, d)[::-1], d)

    def moved(self) -> Move:
        d = self.any_dim()
        if self.chance.random() < 0.4:
            return lambda x: x.flip(d)
        shift, rows = self.chance.choice((1, 2)), self.size(d)
        if d in self.rowed and self.chance.random() < 0.5:
            return lambda x: x.roll(x.shape[d] // rows * shift, d)
        return lambda x: x.roll(shift, d)

    def repeated(self) -> Move:
        d, rank = self.any_dim(), self.few.dim()
        times = [2 if i == d else 1 for i in range(rank)]
        return self.chance.choice(
            [
                lambda x: x.repeat(times),
                lambda x: x.tile(times),
                lambda x: x.repeat_interleave(2, d),
                lambda x: x.repeat([2, *times]),
            ]
        )

    def sliced(self) -> Move:
        d = self.any_dim()
        size, step = self.size(d), self.chance.choice((1, 2, 3))
        if size % step:
            step = 1
        if d in self.rowed:
            at = self.chance.randrange(size)
            if self.chance.random() < 0.5:
                return lambda x: x.narrow(d, x.shape[d] // size * at, x.shape[d] // size)
            return lambda x: x.movedim(d, 0)[::step].movedim(0, d)
        start = self.chance.randrange(max(1, size - 1))
        return lambda x: x.narrow(d, start, size - start)

    def viewed(self) -> Move:
        rank = self.few.dim()
        if rank > 1 and self.chance.random() < 0.5:
            d = self.chance.randrange(rank - 1)
            return lambda x: x.flatten(d, d + 1)
        d = self.any_dim()
        k = self.chance.choice([k for k in (2, 3) if self.size(d) % k == 0] or [1])
        ahead = self.chance.random() < 0.5
        return lambda x: x.unflatten(d, (k, x.shape[d] // k) if ahead else (x.shape[d] // k, k))

    def permuted(self) -> Move:
        order = self.chance.sample(range(self.few.dim()), self.few.dim())
        return lambda x: x.permute(order)

    def entries(self) -> Move:
        moves: list[Move] = [
            torch.tanh, lambda x: x * 2 + 1, lambda x: torch.where(x > 0, x, x.sin()),
            lambda x: x + torch.zeros_like(x), lambda x: x + x.new_ones(x.shape[-1:]),
            lambda x: x * x.new_full(list(x.shape), 0.5),
        ]  # fmt: skip
        return self.chance.choice(moves)

    def linear(self) -> Move:
        d = self.few.dim() - 1
        size = self.size(d)
        if d in self.rowed or size > WIDTH:
            return torch.sin
        return lambda x: x @ WEIGHT[:size, : max(2, size)]

    def picked(self) -> Move:
        d = self.any_dim()
        step = self.chance.choice((1, 1, 2, -1))

        def pick(x: Tensor) -> Tensor:
            at = torch.arange(x.shape[d])
            at = at.flip(0) if step == -1 else at[::step] if x.shape[d] // step * step else at
            return x.index_select(d, at) if step == 1 else x.movedim(d, 0)[at].movedim(0, d)

        even = step != 2 or self.size(d) % 2 == 0
        return pick if even else torch.tanh

    def together(self) -> Move:
        d = self.any_dim()
        return self.chance.choice([lambda x: x.cumsum(d) / 9, lambda x: x.softmax(d)])

    def reduced(self) -> Move:
        others = [d for d in range(self.few.dim()) if d not in self.rowed]
        if not others:
            return torch.tanh
        d = self.chance.choice(others)
        return self.chance.choice([lambda x: x - x.mean(d, keepdim=True), lambda x: x.sum(d)])

    def expanded(self) -> Move:
        d = self.chance.randrange(self.few.dim() + 1)
        sizes = [-1] * (self.few.dim() + 1)
        sizes[d] = 2
        return lambda x: x.unsqueeze(d).expand(sizes)


KINDS: list[Callable[[Drawing], Move]] = [
    Drawing.cat, Drawing.stack, Drawing.parts, Drawing.swapped, Drawing.repeated, Drawing.sliced,
    Drawing.viewed, Drawing.viewed, Drawing.permuted, Drawing.entries,
    Drawing.linear, Drawing.picked, Drawing.reduced, Drawing.expanded,
] * 3 + [Drawing.moved, Drawing.together]  # fmt: skip


def program(seed: int, length: int = 4) -> list[Move]:
    """Operators that all work on a batch of (rows, 2, 6) and keep rows along one dimension."""
    chance = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    many = torch.randn(MANY, 2, 6, generator=g, dtype=torch.float64)
    few, moves = many[:FEW], []
    while len(moves) < length:
        drawing = Drawing(chance, few, many)
        move = drawing.draw()
        a, b = move(few), move(many)
        grown = [m for n, m in zip(a.shape, b.shape, strict=True) if n != m]
        if len(grown) != 1 or grown[0] % MANY or a.dim() > 5 or not 0 < a.numel() <= MOST:
            continue
        few, many = a, b
        moves.append(move)
    return moves


class Programs(nn.Module):
    """The programs first ... first + count - 1, each on the same batch; their mean squares."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.programs = [program(seed) for seed in range(first, first + count)]

    def forward(self, x: Tensor) -> Tensor:
        total = (x * self.scale).mean()
        for moves in self.programs:
            value = x * self.scale
            for move in moves:
                value = move(value)
            total = total + value.square().mean()
        return total
