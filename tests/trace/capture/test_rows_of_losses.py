"""Losses that weigh rows unequally, couple them, or depend on how many there are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.capture.capture import trace
from synchromesh.training.prepare import prepare
from tests.plain import Case, exact, on_ranks, sgd
from tests.ranks import RankFailed, run

D = torch.float64
PLANS = [("single", 1), ("data", 2), ("data", 4), ("tensor", 2), ("data; b=tensor", 2)]


def rows_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


class Net(nn.Module):
    def __init__(self, middle: Any = None, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.middle = middle
        if zero:
            nn.init.zeros_(self.c.weight)
            nn.init.zeros_(self.c.bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        h = h if self.middle is None else self.middle(self, h)
        return self.c(self.b(h).relu())  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Means that do not weigh rows alike

WEIGHT = torch.tensor([1.0, 5.0, 0.2, 1.0], dtype=D)


def class_weights(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHT)


def ignoring(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=1)


def both(model: nn.Module, batch: Any) -> Tensor:
    """Per token, with a class that is ignored and weights."""
    logits = torch.stack([model(batch[0]), model(batch[0].flip(-1))], 1)
    targets = torch.stack([batch[1], torch.full_like(batch[1], 2)], 1)
    return F.nll_loss(
        logits.log_softmax(-1).view(-1, 4), targets.view(-1), weight=WEIGHT, ignore_index=0
    )


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=1, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [class_weights, ignoring, both, smoothed])
@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_mean_over_targets_is_exact_whatever_they_weigh(
    loss: Any, plan: str, ranks: int
) -> None:
    batches = [rows_of(n, i) for i, n in enumerate((8, 7, 3))]
    found = exact(Case(Net, loss, batches), plan, ranks)
    assert not found[0].warned


def test_micro_batches_of_a_mean_over_targets() -> None:
    exact(Case(Net, ignoring, [rows_of(9, i) for i in range(3)], micro_batches=4), "data", 2)


def halved(function: Any) -> Any:
    """The same mean through something whose graph says nothing of rows: the square of its root."""
    return lambda model, batch: function(model, batch).sqrt().square()


def test_rows_of_a_loss_that_shows_nothing_of_them_stay_together() -> None:
    case = Case(Net, halved(class_weights), [rows_of(n, i) for i, n in enumerate((8, 7, 1))])
    (sentence,) = exact(case, "data", 2)[0].warned
    assert "sqrt at the loss works on what rows were reduced to" in sentence
    assert "computes all rows of c, " in sentence
    assert not exact(case, "tensor", 2)[0].warned


def test_micro_batches_of_such_a_loss_are_warned_of() -> None:
    case = Case(Net, halved(class_weights), [rows_of(8, 0)])
    for plan, parts in (("data; @micro_batches=2", 1), ("single", 2)):
        warned = on_ranks(replace(case, micro_batches=parts), plan, 2)[0].warned
        assert [text for text in warned if "return (sum, weight)" in text], plan


# Losses whose graph shows what they make of rows


def decayed(model: nn.Module, batch: Any) -> Tensor:
    return plain_loss(model, batch) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def scaled(model: nn.Module, batch: Any) -> Tensor:
    return (2 * plain_loss(model, batch) - 0.5) / 3


def masked(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch[1] >= 0).to(D)
    return (model(batch[0]).square().mean(1) * mask).sum() / mask.sum()


def mean_of_masked(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch[1] >= 0).to(D)
    return (model(batch[0]).square().mean(1) * mask).mean() / mask.mean()


def kept_dims(model: nn.Module, batch: Any) -> Tensor:
    mask = (batch[1] >= 0).to(D)[:, None]
    total = (model(batch[0]).square() * mask).sum((0, 1), keepdim=True)
    return (total / mask.sum(0, keepdim=True)).squeeze()


def some_ignored(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nothing is ignored in the first batch, which is the example."""
    x, y = rows_of(rows, seed)
    return (x, y) if seed == 0 else (x, y.masked_fill(torch.arange(rows) % 3 == 1, -100))


def two_heads(model: nn.Module, batch: Any) -> Tensor:
    return plain_loss(model, batch) + F.cross_entropy(model(batch[0].flip(1)), batch[1])


def by_class(model: nn.Module, batch: Any) -> Tensor:
    """A mean over those of each class, and one over the classes: fractions side by side."""
    mask = F.one_hot(batch[1].clamp(min=0), 4) + torch.tensor(0.1, dtype=D)
    return ((model(batch[0]).square() * mask).sum(0) / mask.sum(0)).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "loss", [decayed, scaled, masked, mean_of_masked, kept_dims, two_heads, by_class]
)
def test_fractions_are_exact_for_batches_unlike_the_example(loss: Any) -> None:
    short = Case(Net, loss, [some_ignored(n, i) for i, n in enumerate((8, 7, 5))])
    assert not exact(short, "data", 2)[0].warned
    long = Case(Net, loss, [some_ignored(8, i) for i in range(14)])
    assert not exact(long, "tensor", 2)[0].warned  # pieces are tried, and may be kept


def hardest(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean(1).topk(2).values.mean()  # type: ignore[no-any-return]


def balanced(model: nn.Module, batch: Any) -> Tensor:
    return plain_loss(model, batch) + model(batch[0]).mean(0).square().sum()


@pytest.mark.parametrize("loss", [hardest, balanced])
def test_what_no_graph_shows_to_be_a_mean_is_walked_whole_and_named(loss: Any) -> None:
    zero = Case(lambda: Net(zero=True), loss, [some_ignored(8, i) for i in range(14)])
    assert not exact(zero, "tensor", 2)[0].warned
    (sentence,) = exact(replace(zero, batches=zero.batches[:3]), "data", 2)[0].warned
    assert "rows depend on each other" in sentence


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: F.mse_loss(m(b[0]), m(b[0].flip(1))),
        lambda m, b: (m(b[0]).square().sum(1) + 1).mean() * 0.5 + m.a.weight.norm(),
        lambda m, b: m(b[0]).square().sum() / b[0].shape[0],
        lambda m, b: F.kl_div(
            m(b[0]).log_softmax(1), m(b[0].flip(1)).softmax(1), reduction="batchmean"
        ),
        lambda m, b: (m(b[0]).square().sum(), b[0].shape[0]),
        lambda m, b: -(-m(b[0]).logsumexp(1)).mean(),
    ],
)
def test_means_over_rows_are_known_as_such(loss: Any) -> None:
    step = trace(Net(), loss, rows_of(6, 0), training=True)
    assert not step.doubt and not step.coupled and not step.targets


# A weight that depends on parameters


def learned_weight(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    out = model(batch[0])
    weight = out.pow(2).mean(1).sigmoid()
    return (F.cross_entropy(out, batch[1], reduction="none") * weight).sum(), weight.sum()


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_weight_may_depend_on_parameters(plan: str, ranks: int) -> None:
    batches = [rows_of(n, i) for i, n in enumerate((8, 7, 1))]
    found = exact(Case(Net, learned_weight, batches), plan, ranks)
    assert not found[0].opaque


def accumulated() -> str:
    model = Net()
    trainer = prepare(model, sgd(model), learned_weight, rows_of(8, 0), "data")
    try:
        trainer.step(trainer.shard(rows_of(8, 0)), micro_batches=2)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_such_a_weight_is_not_accumulated() -> None:
    assert all("weight depends on parameters" in sentence for sentence in run(2, accumulated))


# Rows that are coupled


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T * 3, torch.arange(z.shape[0]))


def centred(m: nn.Module, h: Tensor) -> Tensor:
    return h - h.mean(0)


@pytest.mark.parametrize("plan", ["tensor", "tensor; @pieces=4"])
def test_rows_that_are_coupled_stay_together_in_all_steps(plan: str) -> None:
    """Twelve steps and more: pieces are tried in the first ones."""
    batches = [rows_of(8, i) for i in range(14)]
    found = exact(Case(Net, contrastive, batches), plan, 2)
    assert not found[0].opaque
    exact(Case(lambda: Net(centred), plain_loss, batches), plan, 2)
    norm = nn.BatchNorm1d(
        8, affine=False, track_running_stats=False
    )  # an effect would give it away
    exact(Case(lambda: Net(lambda m, h: norm(h)), plain_loss, batches), plan, 2)


def test_coupled_rows_stay_together_under_any_plan() -> None:
    """More in tests/training/test_coupled_rows.py."""
    batches = [rows_of(n, i) for i, n in enumerate((8, 7, 1))]
    for case in (
        Case(Net, contrastive, batches),
        Case(lambda: Net(centred), plain_loss, batches),
    ):
        (sentence,) = exact(case, "data", 2)[0].warned
        assert "each of the 2 ranks computes all rows of" in sentence


# The number of rows


def doubles_many(m: nn.Module, h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 4 else h


def odd_ones(m: nn.Module, h: Tensor) -> Tensor:
    return h + 1 if h.shape[0] % 2 else h


def pairs(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return (out.view(out.shape[0] // 2, 2, 4).diff(dim=1) ** 2).mean()


@pytest.mark.parametrize("middle", [doubles_many, odd_ones])
@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("tensor", 2), ("data; b=tensor", 2)])
def test_branches_on_the_number_of_rows(middle: Any, plan: str, ranks: int) -> None:
    sizes = (8, 4, 12) if middle is odd_ones and plan.startswith("data") else (8, 6, 3, 2, 5, 4)
    batches = [rows_of(n, i) for i, n in enumerate(sizes)]
    found = exact(Case(lambda: Net(middle), plain_loss, batches), plan, ranks)
    assert not found[0].opaque


def test_a_branch_is_that_of_the_global_batch() -> None:
    """Ranks with 3 of 6 rows take the branch of 6."""
    batches = [rows_of(n, i) for i, n in enumerate((6, 8, 4))]
    exact(Case(lambda: Net(doubles_many), plain_loss, batches), "data", 2)


def test_rows_that_belong_together_are_not_divided() -> None:
    exact(Case(Net, pairs, [rows_of(8, 0), rows_of(4, 1)]), "data", 2)
    with pytest.raises(RankFailed, match="of the rows of each data rank, but one has 3 of 6"):
        on_ranks(Case(Net, pairs, [rows_of(8, 0), rows_of(6, 1)]), "data", 2)


def one_row() -> str:
    model = Net(doubles_many)
    trainer = prepare(model, sgd(model), plain_loss, rows_of(8, 0), "tensor")
    try:
        trainer.step(rows_of(1, 0))
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_one_row_that_is_another_case_is_refused() -> None:
    assert all("a global batch of 1 row is another case" in told for told in run(2, one_row))
