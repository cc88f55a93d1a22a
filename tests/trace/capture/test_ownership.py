"""Which component a node belongs to: whoever touches a buffer that changes stays together."""

import torch
from torch import Tensor, nn

from synchromesh.trace.capture.capture import trace


class Counting(nn.Module):
    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.linear(x) / self.count  # type: ignore[no-any-return]


class Shared(nn.Module):
    """`b` and `d` count in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        count = torch.zeros(())
        self.a, self.b = nn.Linear(4, 4), Counting(count)
        self.c, self.d, self.e = nn.Linear(4, 4), Counting(count), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.e(self.d(self.c(self.b(self.a(x)))))  # type: ignore[no-any-return]


class Read(nn.Module):
    """`d` reads what `b` counts, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), Counting(torch.zeros(())), nn.Linear(4, 4)
        self.d, self.e = nn.Bilinear(4, 1, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c(self.b(self.a(x)))
        return self.e(self.d(x, self.b.count.expand(len(x), 1)))  # type: ignore[no-any-return]


def test_who_touches_a_buffer_that_changes_stays_together() -> None:
    for model in (Shared(), Read()):
        step = trace(model, lambda m, x: m(x).mean(), torch.ones(3, 4), training=True)
        assert not step.reason and step.chain.names == ("a", "b", "e")
        assert step.merged == (
            "the buffer b.count, which changes, is used in b and in d: all between stays together"
        )
