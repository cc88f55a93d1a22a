"""Fewer rows than ranks, masks, branches: what a rank without rows runs reaches nothing."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.engine.absent import isolated
from synchromesh.trace import meta
from synchromesh.training.prepare import prepare
from tests.plain import Case, adamw, exact, on_ranks, plain, sgd
from tests.ranks import RankFailed, run

D = torch.float64
PLANS = [("single", 1), ("data", 2), ("data", 4), ("tensor", 2), ("hybrid:tensor=2; a=data", 4)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = generator(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def words(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    g = generator(seed)
    return {
        "x": torch.randint(0, 11, (rows, length), generator=g),
        "mask": torch.ones(rows, length, dtype=D),
        "y": torch.randint(0, 4, (rows,), generator=g),
    }


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def words_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


class Masked(nn.Module):
    """A mean over a mask: not a number where a row is zeros."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.b(self.a(x)) * mask[..., None]
        return self.c(h.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_fewer_rows_than_ranks_of_another_length_than_the_example(plan: str, ranks: int) -> None:
    batches = [words(4, 6, 0), words(1, 4, 1), words(3, 6, 2), words(2, 4, 3)]
    exact(Case(Masked, words_loss, batches), plan, ranks)


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("data", 2)])
def test_more_micro_batches_than_rows(plan: str, ranks: int) -> None:
    batches = [words(3, 6, 0), words(1, 6, 1)]
    exact(Case(Masked, words_loss, batches, micro_batches=4), plan, ranks)


class Spoiling(nn.Module):
    """A row of the batch that makes infinities alone, and weights none of the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.position = nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        return self.b(self.a(x).tanh() * self.position.exp())  # type: ignore[no-any-return]


def first_row_explodes(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Where a rank sees one row alone, its loss is infinite and weighs nothing."""
    out = model(batch[0])
    each = F.cross_entropy(out, batch[1], reduction="none")
    return (each / (each.detach() > -1)).sum(), torch.ones_like(each).sum()


@pytest.mark.parametrize(("plan", "ranks"), [("data", 3), ("data; b=tensor", 3)])
def test_counters_and_tables_of_a_rank_without_rows_go_on(plan: str, ranks: int) -> None:
    batches = [rows_of(6, 0), rows_of(1, 1), rows_of(2, 2)]
    exact(Case(Spoiling, first_row_explodes, batches), plan, ranks)


def test_whatever_a_row_makes_no_gradient_leaves_an_absent_rank() -> None:
    """Infinities and not-a-numbers of a stand-in row become gradients of exactly zero."""
    graph = torch.fx.Graph()
    graph.placeholder("axis")
    rows = graph.placeholder("rows")
    meta.of_rows.set(rows, True)
    x, weight, table, buffer = (graph.placeholder(n) for n in ("x", "weight", "table", "buffer"))
    meta.of_rows.set(x, True)
    meta.is_buffer.set(buffer, True)
    free = graph.call_function(torch.mul, (table, 2.0))
    made = graph.call_function(torch.div, (graph.call_function(torch.mul, (x, weight)), 0.0))
    graph.call_function(torch.ops.aten.add_.Tensor, (buffer, made))
    both = graph.call_function(torch.add, (made, free))
    graph.output((both, free))
    module = isolated(torch.fx.GraphModule({}, graph))
    leaf = [torch.ones(2, requires_grad=True) for _ in range(3)]
    kept = torch.zeros(2)
    value, own = module(None, 1, leaf[0], leaf[1], leaf[2], kept)
    assert not value.isfinite().any() and not kept.any()
    torch.autograd.backward([value, own], [torch.full((2,), torch.nan), torch.ones(2)])
    assert torch.equal(leaf[0].grad, torch.zeros(2))
    assert torch.equal(leaf[1].grad, torch.zeros(2))
    assert torch.equal(leaf[2].grad, torch.full((2,), 2.0))  # the rank's own: no row entered it


# A model that runs as it is


class Branching(nn.Module):
    """Which branch is trained depends on the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.u, self.v, self.c = (nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        return self.c(self.u(h) if float(x.sum()) > 0 else self.v(h))  # type: ignore[no-any-return]


def signed(rows: int, seed: int, sign: int) -> tuple[Tensor, Tensor]:
    x, y = rows_of(rows, seed)
    return x.abs() * sign, y


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_branch_that_no_row_used_does_not_move(ranks: int) -> None:
    """AdamW's decay and momentum would move it for a gradient of zeros."""
    batches = [signed(6, 0, 1), signed(1, 1, 1), signed(1, 2, -1), signed(6, 3, 1)]
    found = exact(Case(Branching, loss, batches, adamw), "data", ranks)
    assert "could not be traced" in found[0].opaque


class Follower(nn.Module):
    """A teacher that follows its student in forward, a counter, a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.times = 1.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                mine.mul_(0.5).add_(theirs, alpha=0.5)
        self.calls = self.calls + 1
        self.times = self.times * 1.5
        return self.head(self.student(x) + self.teacher(x) * self.times)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("data", 3), ("tensor", 2)])
def test_what_a_forward_changes_comes_to_ranks_without_rows(plan: str, ranks: int) -> None:
    batches = [rows_of(6, 0), rows_of(1, 1), rows_of(2, 2), rows_of(6, 3)]
    found = exact(Case(Follower, loss, batches), plan, ranks)
    assert found[0].opaque


def switched() -> tuple[list[float], float]:
    """Ranks that were idle have not run the forward that changes attributes."""
    model = Follower()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), loss, rows_of(6, 0), "single")
        losses = []
        for i in range(4):
            if i == 2:
                trainer.switch("data")
            losses.append(float(trainer.step(trainer.shard(rows_of(6, i)))))
    trainer.close()
    return losses, model.times


def test_attributes_come_along_to_ranks_that_were_idle() -> None:
    expected = plain(Case(Follower, loss, [rows_of(6, i) for i in range(4)]))
    for losses, times in run(2, switched):
        assert losses == pytest.approx(expected.losses, rel=1e-10) and times == 1.5**4


class Remembering(nn.Module):
    """State in a list, which no message can carry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 4)
        self.history = [1.0]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(self.history[-1] * 1.5)
        return self.c(self.a(x) * self.history[-2])  # type: ignore[no-any-return]


def test_state_in_containers_is_kept_or_the_batch_refused_by_name() -> None:
    case = Case(Remembering, loss, [rows_of(6, 0), rows_of(5, 1)])
    assert exact(case, "data", 2)[0].opaque
    with pytest.raises(RankFailed, match=r"1 rows leaves .* 2 data ranks .* changes history"):
        on_ranks(Case(Remembering, loss, [rows_of(6, 0), rows_of(1, 1)]), "data", 2)


class Normed(nn.Module):
    """Batch norms in a model that runs as it is; `odd` takes another way on the last rank."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.odd = odd
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.a(x)).tanh()
        if not self.odd or float(x[0, 0]) > 0:
            h = self.second(self.b(h))
        return self.c(h * (1 if float(x.abs().sum()) < 1e9 else 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 3])
def test_synchronised_norms_of_a_model_that_runs_as_it_is(ranks: int) -> None:
    batches = [rows_of(6, 0), rows_of(2, 1), rows_of(7, 2)]
    found = exact(Case(Normed, loss, batches, options={"sync_batch_norm": True}), "data", ranks)
    assert found[0].opaque


def other_branches() -> str:
    model = Normed(odd=True)
    x, y = rows_of(6, 0)
    x[:, 0] = torch.tensor([1.0, 1, 1, -1, -1, -1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = prepare(model, sgd(model), loss, (x, y), "data", sync_batch_norm=True)
    try:
        trainer.step(trainer.shard((x, y)))
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_ranks_that_take_other_branches_are_told_so_and_none_waits() -> None:
    for told in run(2, other_branches, timeout=20.0):
        assert "ranks took different branches" in told and "sync_batch_norm=False" in told


# Batches as loaders and users give them


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c = nn.Linear(6, 8), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("plan", "ranks"), [("single", 1), ("single", 2), ("data", 2), ("data", 4), ("tensor", 2)]
)
def test_a_tuple_as_example_and_lists_as_batches(plan: str, ranks: int) -> None:
    batches = [list(rows_of(n, i)) for i, n in enumerate((8, 1, 3))]
    exact(Case(Plain, loss, batches, example=rows_of(8, 0)), plan, ranks)


def evaluated(plan: str) -> dict[str, float]:
    """A data set of another structure than the example, of fewer rows than ranks at its end."""
    model = Plain()
    trainer = prepare(model, sgd(model), loss, rows_of(8, 0), plan)
    data = torch.utils.data.TensorDataset(*rows_of(9, 1))

    def metric(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(batch[0]), batch[1], reduction="sum")}

    found = trainer.evaluate(trainer.loader(data, batch_size=4), metric)
    trainer.close()
    return found


@pytest.mark.parametrize("plan", ["single", "data", "tensor"])
def test_evaluation_of_lists_where_the_example_is_a_tuple(plan: str) -> None:
    x, y = rows_of(9, 1)
    with torch.no_grad():
        expected = float(F.cross_entropy(Plain().eval()(x), y))
    for found in run(3 if plan == "data" else 2, evaluated, plan):
        assert found["loss"] == pytest.approx(expected, rel=1e-10)


def with_a_scale_of_its_own() -> str:
    model = Plain()

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch[:2]) * batch[2]

    rank = torch.distributed.get_rank()
    batch = (*rows_of(4, 0), torch.tensor(2.0, dtype=D))
    trainer = prepare(model, sgd(model), scaled, batch, "data")
    trainer.step(trainer.shard(batch))
    try:
        trainer.step((*trainer.shard(batch[:2]), torch.tensor(2.0 + rank, dtype=D)))
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_what_all_rows_share_must_be_the_same_on_all_ranks() -> None:
    for told in run(2, with_a_scale_of_its_own):
        assert (
            "other values than rank 0 of what all rows share (0-d tensors, numbers, texts)" in told
        )
