"""Arguments of a local graph have names of its own, whatever the values it reads are called."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.plain import Case, exact


class Block(nn.Module):
    """A residual block with a running mean of what it is given, and a second skip.

    The mean is taken of `x` as it is, the product of `x` with a partial gradient: the block reads
    one value, say `add_tensor`, in two states, and beside it another, called `add_tensor_1`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axis = nn.Parameter(torch.randn(6, 5).double())
        self.rows = nn.Parameter(torch.randn(5, 6).double())
        self.register_buffer("mean", torch.zeros(5).double())
        self.mean: Tensor

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x + F.linear(torch.relu(F.linear(x, self.axis)), self.rows) + skip


class Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(5, 5).double()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) + 0.5
        skip = x + 1.0
        for block in self.blocks:
            x, skip = block(x, skip), x
        out: Tensor = self.head(x)
        return out


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["axis"]) - batch["rows"]).square().mean()


def batches() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(2)
    return [
        {
            "axis": torch.randn(rows, 5, generator=made).double(),
            "rows": torch.randn(rows, 3, generator=made).double(),
        }
        for rows in (6, 5, 6)
    ]


def test_values_of_any_names_are_read_in_several_states() -> None:
    found = exact(Case(Residuals, squares, batches()), "tensor", 2)
    assert not found[0].opaque
