"""One to six rows on one to four ranks, under every kind of plan, in one run each: the plain loop.

The model has what could tell a stand-in row from a real one: a mean over a mask, a table without
rows that is shared by components, a norm, a counter, rows that are merged and parted again.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from tests.plain import Case, Outcome, adamw, apart, plain
from tests.ranks import run
from tests.traces import shared

D = torch.float64
SIZES = (6, 1, 2, 5, 3, 4, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, h: Tensor, table: Tensor) -> Tensor:
        return h + self.down(self.up(self.norm(h) * table).relu())  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.table = nn.Embedding(12, 8), nn.Parameter(torch.rand(5, 8))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.twin, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        table = self.table.tanh()
        h = self.words(x) + table
        for block in self.blocks:
            h = block(h, table)
        counted = mask.sum(1, keepdim=True)
        h = (h * mask[..., None]).sum(1) / (counted + (counted == 0))
        both = self.twin(torch.cat([h, -h], 0)).tanh()
        one, other = both.chunk(2, 0)
        return self.head(one * other + F.linear(h, self.words.weight[:8].T))  # type: ignore[no-any-return]


def batch(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, 5, generator=g) < 0.6).to(D)
    mask[1:2] = 0  # a row of which nothing counts, the only one of some ranks
    return {
        "x": torch.randint(0, 12, (rows, 5), generator=g),
        "mask": mask,
        "y": torch.randint(0, 4, (rows,), generator=g),
    }


def mean(model: nn.Module, b: Any) -> Tensor:
    return F.mse_loss(model(b["x"], b["mask"]), F.one_hot(b["y"], 4).to(D))


def pair(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Rows weigh by their masks."""
    each = F.cross_entropy(model(b["x"], b["mask"]), b["y"], reduction="none")
    weight = b["mask"].sum(1)
    return (each * weight).sum(), weight.sum()


BATCHES = [batch(n, i) for i, n in enumerate(SIZES)]
PLANS = {
    1: ["single"],
    2: ["single", "data", "tensor", "data; blocks.1*=tensor", "tensor; head=data; words=data"],
    3: ["data", "data; twin=tensor", "data; @rows=3,1,2", "data; @ranks=0,2"],
    4: [
        "data",
        "hybrid:tensor=2",
        "hybrid:tensor=2; blocks.0*=data; head=tensor",
        "data; blocks*=hybrid:tensor=2; twin=tensor",
    ],
}


def under(plans: list[str]) -> list[Outcome]:
    found = []
    for plan in plans:
        for loss in (mean, pair):
            model = Model()
            trainer = prepare(model, adamw(model), loss, BATCHES[0], plan)
            losses = [float(trainer.step(trainer.shard(b))) for b in BATCHES]
            found.append(Outcome(losses, trainer.state_dict(), [], trainer.traced.reason))
            trainer.close()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:nothing of")
@pytest.mark.parametrize("ranks", PLANS)
def test_few_rows_under_every_kind_of_plan(ranks: int) -> None:
    expected = [plain(Case(Model, loss, BATCHES, adamw)) for loss in (mean, pair)]
    plans = PLANS[ranks]
    with (
        shared("few rows", Model(), mean, BATCHES[0], *plans, ranks=ranks),
        shared("few rows", Model(), pair, BATCHES[0], *plans, ranks=ranks),
    ):
        answers = run(ranks, under, plans) if ranks > 1 else [under(plans)]
    for outcomes in answers:
        for plan, found in zip([p for p in plans for _ in expected], outcomes, strict=True):
            gap = min(apart(found, one) for one in expected)
            assert gap <= 1e-10 and not found.opaque, (plan, gap, found.losses, found.opaque)


LENGTHS = (5, 5, 3, 5, 4)


class AnyLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.words(x)).relu()).mean(1))  # type: ignore[no-any-return]


def words(length: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rows = 6 if seed < 2 else 40
    return (
        torch.randint(0, 12, (rows, length), generator=g),
        torch.randint(0, 4, (rows,), generator=g),
    )


def cross_entropy(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def resized() -> Outcome:
    """Batches grow in the middle; what is planned for later is planned for their new size."""
    batches = [words(n, i) for i, n in enumerate(LENGTHS)]
    model = AnyLength()
    trainer = prepare(model, adamw(model), cross_entropy, batches[0], "tensor")
    losses = []
    for i, b in enumerate(batches):
        if i == 2:  # as the trainer does where it adapts
            trainer.planning.rows = 40
        if i == 3:
            trainer.switch("data; up=tensor")
        if i == 4:
            trainer.switch("tensor")
        losses.append(float(trainer.step(trainer.shard(b))))
    found = Outcome(losses, trainer.state_dict(), [], trainer.traced.reason)
    trainer.close()
    return found


@pytest.mark.filterwarnings("ignore:nothing of")
def test_batches_of_another_size_than_was_planned_for() -> None:
    batches = [words(n, i) for i, n in enumerate(LENGTHS)]
    expected = plain(Case(AnyLength, cross_entropy, batches, adamw))
    for found in run(2, resized):
        assert apart(found, expected) <= 1e-10 and not found.opaque
