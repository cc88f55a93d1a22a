"""Features of the trainer, each against a plain loop on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.models import FAMILIES, Family
from tests.ranks import run
from tests.traces import remembered, shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
D = torch.float64


class Net(nn.Module):
    """Two hidden layers, of which one may be frozen, one that nothing uses, a head."""

    def __init__(self, frozen: bool = False, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.second = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 4)
        self.double()
        self.second.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        return self.head(self.dropout(self.second(x)).relu())  # type: ignore[no-any-return]


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g, dtype=D), torch.randint(0, 4, (rows,), generator=g)


def mean_loss(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def weighted_loss(model: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    """Rows weigh very differently: between nothing and 50."""
    weight = (b[0][:, 0] * 10).exp().clamp(max=50.0) * (b[1] > 0)
    return (F.cross_entropy(model(b[0]), b[1], reduction="none") * weight).sum(), weight.sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[n].to(t), t, rtol=tolerance, atol=tolerance) for n, t in b.items()
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def eager_gradients(model: nn.Module, loss: Any, *batches: Any) -> dict[str, Tensor]:
    """Of the mean over all rows of all batches, or of all their sums over all their weights."""
    pairs = [loss(model, b) for b in batches]
    if isinstance(pairs[0], Tensor):
        pairs = [(value * len(b[0]), len(b[0])) for value, b in zip(pairs, batches, strict=True)]
    value = sum(s for s, _ in pairs) / sum(w for _, w in pairs)
    value.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {n: g.clone() for n, g in trainer.state.gathered(trainer.gradients())}


def alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Equal gradients; those that eager does not have are zero."""
    return all(torch.allclose(g, expected.get(n, torch.zeros_like(g)), rtol=1e-9, atol=1e-12)
               for n, g in found.items())  # fmt: skip


# Parameters


def frozen_and_unused(plan: str) -> dict[str, Tensor]:
    model = Net(frozen=True)
    trainer = prepare(model, adamw(model), mean_loss, batch(8), plan)
    for i in range(3):
        trainer.backward(trainer.shard(batch(8, i)))
        assert model.unused.weight.grad is None and model.second.weight.grad is None
        trainer.update()
    state = trainer.state_dict()
    trainer.close()
    return state


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_frozen_and_unused_parameters_stay_as_they_are(plan: str) -> None:
    model = Net(frozen=True)
    before, optimizer = weights(model), adamw(model)
    for i in range(3):
        optimizer.zero_grad()
        mean_loss(model, batch(8, i)).backward()
        optimizer.step()
    with shared("Net", Net(frozen=True), mean_loss, batch(8), plan, ranks=2):
        states = run(2, frozen_and_unused, plan)
    for state in states:
        assert close(state, weights(model))
        for name in ("unused.weight", "second.weight"):  # weight decay did not touch them either
            assert torch.equal(state[name], before[name])


# Losses that weigh, accumulation, clipping


def accumulated(plan: str) -> list[bool]:
    """Two batches of other sizes accumulate, are clipped; then one step in micro-batches."""
    found = []
    parts = (batch(8, 0), batch(5, 1))
    for loss in (mean_loss, weighted_loss):
        model = Net()
        expected = eager_gradients(Net(), loss, *parts)
        trainer = prepare(model, adamw(model), loss, batch(8), plan)
        trainer.backward(trainer.shard(parts[0]), last=False)
        noted = trainer.backward(trainer.shard(parts[1]))
        whole = tuple(torch.cat(leaves) for leaves in zip(*parts, strict=True))
        result = loss(Net(), whole)
        value = result[0] / result[1] if isinstance(result, tuple) else result
        found.append(abs(float(noted) - value.item()) < 1e-10)
        found.append(alike(gradients(trainer), expected))
        made = _with(expected)
        norm = torch.nn.utils.clip_grad_norm_(made, 0.05)
        found.append(abs(float(trainer.clip(0.05)) - float(norm)) < 1e-10)
        clipped = {n: p.grad for n, p in zip(expected, made, strict=True) if p.grad is not None}
        found.append(alike(gradients(trainer), clipped))
        trainer.close()
        model, plain = Net(), Net()
        trainer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch(8), plan)
        trainer.step(trainer.shard(batch(7)), micro_batches=3)
        eager_gradients(plain, loss, batch(7))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        found.append(close(trainer.state_dict(), weights(plain)))
        trainer.close()
    return found


def _with(found: dict[str, Tensor]) -> list[Tensor]:
    """Tensors with these gradients."""
    made = [torch.zeros_like(g, requires_grad=True) for g in found.values()]
    for p, g in zip(made, found.values(), strict=True):
        p.grad = g.clone()
    return made


@pytest.mark.parametrize(
    ("plan", "ranks"), [("data", 2), ("tensor", 2), ("hybrid:tensor=2; head=tensor", 4)]
)
def test_weighted_losses_accumulation_and_clipping(plan: str, ranks: int) -> None:
    with (
        shared("Net", Net(), mean_loss, batch(8), plan, ranks=ranks),
        shared("Net", Net(), weighted_loss, batch(8), plan, ranks=ranks),
    ):
        answers = run(ranks, accumulated, plan)
    for found in answers:
        assert all(found), found


def shares(plan: str, loss: Any) -> list[bool]:
    """Three batches of other sizes, each mean with a share of its own."""
    parts = [(batch(rows, i), share) for i, (rows, share) in enumerate(((8, 0.5), (5, 2), (3, 1)))]
    plain, model = Net(), Net()
    wanted = torch.zeros((), dtype=D)
    for part, share in parts:
        result = loss(plain, part)
        value = result[0] / result[1] if isinstance(result, tuple) else result
        (share * value).backward()
        wanted += share * value.detach()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    trainer = prepare(model, adamw(model), loss, batch(8), plan)
    for number, (part, share) in enumerate(parts, 1):
        noted = trainer.backward(trainer.shard(part), last=number == 3, share=share)
    found = [abs(float(noted - wanted)) < 1e-10, abs(float(trainer.clip(0.05) - norm)) < 1e-10]
    trainer.update()
    adamw(plain).step()
    found.append(close(trainer.state_dict(), weights(plain)))
    trainer.backward(trainer.shard(parts[0][0]), last=False, share=1.0)
    with pytest.raises(ValueError, match="backward calls so far: 1,"):
        trainer.update()
    with pytest.raises(ValueError, match="share= to all backward calls"):
        trainer.backward(trainer.shard(parts[0][0]))
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("plan", "loss"),
    [
        ("sharded-data", weighted_loss),
        ("tensor; @micro_batches=2", mean_loss),
        ("data; @stages=0:first/1:head; @micro_batches=2", mean_loss),
    ],
)
def test_batches_have_shares_of_a_loss_whatever_their_rows(plan: str, loss: Any) -> None:
    with shared("Net", Net(), loss, batch(8), plan, ranks=2):
        answers = run(2, shares, plan, loss)
    for found in answers:
        assert all(found), found


# Optimizers

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "groups": lambda m: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.2},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 0.03},
        ],
        lr=0.01,
    ),
}


def stepped(plan: str | None) -> list[dict[str, Tensor]]:
    """Weights after four steps with a scheduler of the user's, by optimizer; plan None: a plain
    loop.
    """
    out = []
    for make in OPTIMIZERS.values():
        model = Net()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3)
        trainer = None if plan is None else prepare(model, optimizer, mean_loss, batch(8), plan)
        for i in range(4):
            if trainer is None:
                optimizer.zero_grad()
                mean_loss(model, batch(8, i)).backward()
                optimizer.step()
            else:
                trainer.step(trainer.shard(batch(8, i)))
            scheduler.step()
        out.append(weights(model) if trainer is None else trainer.state_dict())
        if trainer is not None:
            trainer.close()
    return out


@pytest.mark.parametrize("plan", ["data", "tensor; head=data"])
def test_optimizers_groups_and_schedulers_of_the_user(plan: str) -> None:
    expected = stepped(None)
    with shared("Net", Net(), mean_loss, batch(8), plan, ranks=2):
        answers = run(2, stepped, plan)
    for got in answers:
        for name, a, b in zip(OPTIMIZERS, got, expected, strict=True):
            assert close(a, b), name


# Evaluation


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.x, self.y = batch(count, 9)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def metric(model: nn.Module, b: Any) -> dict[str, Tensor]:
    out = model(b[0])
    return {
        "loss": F.cross_entropy(out, b[1], reduction="sum"),
        "right": (out.argmax(-1) == b[1]).sum(),
    }


def evaluated(plan: str) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    model = Net(norm=True)
    trainer = prepare(model, adamw(model), mean_loss, batch(8), plan, sync_batch_norm=True)
    data = Rows(11)
    for _ in range(2):
        trainer.step(trainer.shard(batch(8, 4)))
    model.dropout.p = 0.5  # off in evaluation
    noted = trainer.evaluate(trainer.loader(data, 4), metric)
    again = trainer.evaluate(trainer.loader(data, 4), metric)
    trainer.switch("tensor")
    moved = trainer.evaluate(trainer.loader(data, 4), metric)
    trainer.close()
    return noted, again, moved


def test_evaluation_in_eval_mode_equals_eager_under_every_plan() -> None:
    model = Net(norm=True)
    optimizer = adamw(model)
    for _ in range(2):
        optimizer.zero_grad()
        mean_loss(model, batch(8, 4)).backward()
        optimizer.step()
    with torch.no_grad():
        sums = metric(model.eval(), batch(11, 9))
    expected = {k: float(v) / 11 for k, v in sums.items()}
    plans = ("data", "tensor", "tensor; second=data")
    model.dropout.p = 0.5
    for cuts in ((), ("second",)):
        remembered("Net", model, metric, batch(4), training=False, cuts=cuts)
    with shared("Net", Net(norm=True), mean_loss, batch(8), *plans, ranks=2):
        answers = [results for plan in plans for results in run(2, evaluated, plan)]
    for results in answers:
        for got in results:
            assert got == pytest.approx(expected, rel=1e-10)


# Batches


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.out = nn.Linear(8, 12)
        self.double()

    def forward(self, ids: Tensor, keep: Tensor, scale: Tensor) -> Tensor:
        # type: ignore[no-any-return]
        return self.out(self.embedding(ids) * keep.unsqueeze(-1) * scale)


def masked_batch(rows: int, length: int = 5, seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 12, (rows, length), generator=g)
    return {"in": (ids, ids % 3 > 0), "scale": torch.tensor(1.5, dtype=D), "name": "text", "n": 3}


def masked_loss(model: nn.Module, b: Any) -> Tensor:
    ids, keep = b["in"]
    out = model(ids, keep, b["scale"]) / b["n"]
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def odd_batches(plan: str) -> tuple[list[float], list[str]]:
    """Nested batches; other lengths; fewer rows than ranks."""
    import warnings

    model = Masked()
    trainer = prepare(
        model, torch.optim.SGD(model.parameters(), lr=1.0), masked_loss, masked_batch(8), plan
    )
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        losses = [float(trainer.step(trainer.shard(masked_batch(8, 5, 1))))]
        for length in (3, 7, 3, 2, 4, 6, 8, 9, 10):
            losses.append(float(trainer.step(trainer.shard(masked_batch(6, length, length)))))
        losses.append(float(trainer.step(trainer.shard(masked_batch(1, 5, 2)))))
    trainer.close()
    return losses, [str(w.message) for w in noted]


@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_nested_batches_other_lengths_and_fewer_rows_than_ranks(plan: str) -> None:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = []
    shapes = [(8, 5, 1), *((6, n, n) for n in (3, 7, 3, 2, 4, 6, 8, 9, 10)), (1, 5, 2)]
    for rows, length, seed in shapes:
        optimizer.zero_grad()
        value = masked_loss(model, masked_batch(rows, length, seed))
        value.backward()
        optimizer.step()
        expected.append(value.item())
        remembered("Masked", model, masked_loss, masked_batch(rows, length), training=True)
    with shared("Masked", model, masked_loss, masked_batch(8), plan, ranks=2):
        first, second = run(2, odd_batches, plan)
    assert first[0] == second[0] == pytest.approx(expected, rel=1e-10)
    assert len(first[1]) == 1 and "8 kinds of batches were traced" in first[1][0]
    assert first[1][0].endswith(
        "batch['in'][0] had rows of shape (8,), then (9,): pad to a few lengths"
    )
    assert second[1] == []


# Layouts out of the ordinary


def small(family: str, heads: int | None) -> Family:
    model, loss, make = FAMILIES[family]() if heads is None else three_heads()
    return model.double(), loss, make


def curve(plan: str | None, family: str = "vit", heads: int | None = None) -> list[float]:
    model, loss, make = small(family, heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = None if plan is None else prepare(model, optimizer, loss, make(12, 0, D), plan)
    out = []
    for i in range(2):
        b = make(12 - i, i, D)
        if trainer is not None:
            out.append(float(trainer.step(trainer.shard(b))))
            continue
        optimizer.zero_grad()
        value = loss(model.train(), b)
        value.backward()
        optimizer.step()
        out.append(value.item())
    if trainer is not None:
        trainer.close()
    return out


def three_heads() -> Any:
    import transformers as hf

    from tests.models import image_loss, images

    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=3, intermediate_size=16,
        image_size=8, patch_size=4, num_labels=8, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return hf.ViTForImageClassification(config), image_loss, images(3, 8, 8)


@pytest.mark.parametrize(
    ("plan", "ranks", "family", "heads"),
    [
        ("data; @rows=3,1", 2, "cnn", None),
        ("tensor; @ranks=1,0", 2, "cnn", None),
        ("tensor", 2, "vit", 3),
        ("hybrid:tensor=2; hidden=hybrid:tensor=3; @ranks=5,1,2,3,4,0", 6, "cnn", None),
    ],
)
def test_uneven_rows_rank_order_odd_heads_and_degrees_that_do_not_nest(
    plan: str, ranks: int, family: str, heads: int | None
) -> None:
    expected = curve(None, family, heads)
    model, loss, make = small(family, heads)
    with shared((family, heads), model, loss, make(12, 0, D), plan, ranks=ranks):
        answers = run(ranks, curve, plan, family, heads)
    for got in answers:
        assert got == pytest.approx(expected, rel=1e-10)


def half_precision(plan: str) -> list[float]:
    model, loss, make = FAMILIES["vit"]()
    trainer = prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss,
        make(8),
        plan,
        autocast=torch.bfloat16,
    )
    out = [float(trainer.step(trainer.shard(make(8, i)))) for i in range(3)]
    assert all(p.dtype is torch.float32 for p in model.parameters())
    trainer.close()
    return out


def test_autocast_is_close_to_eager_autocast() -> None:
    model, loss, make = FAMILIES["vit"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for i in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model.train(), make(8, i))
        value.backward()
        optimizer.step()
        expected.append(value.item())
    with shared("vit", model, loss, make(8), "data", autocast=torch.bfloat16):
        answers = [got for plan in ("data", "tensor") for got in run(2, half_precision, plan)]
    for got in answers:
        assert got == pytest.approx(expected, rel=1e-2)


# Sparse gradients


class Bag(nn.Module):
    """A table that would have sparse gradients, used with a branch that cannot be traced or
    without."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = branches
        self.table, self.head = nn.Embedding(10, 8, sparse=True, padding_idx=2), nn.Linear(8, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x[:, :3] * 3).abs().long() % 10).sum(1)
        if self.branches and float(found.detach().sum()) > 1e9:
            found = found * 2
        return self.head(found)  # type: ignore[no-any-return]


def bags(plan: str, branches: bool) -> tuple[list[float], dict[str, Tensor]]:
    model = Bag(branches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = prepare(model, optimizer, mean_loss, batch(8), plan)
    assert trainer.traced.opaque == branches
    noted = []
    for i in range(3):
        value = trainer.backward(trainer.shard(batch(8, i)), last=False)
        trainer.backward(trainer.shard(batch(4, i + 3)))
        noted += [float(value), float(trainer.clip(0.2))]
        trainer.update()
    state = trainer.state_dict()
    trainer.close()
    return noted, state


@pytest.mark.filterwarnings("ignore:the model runs whole")
@pytest.mark.filterwarnings("ignore:the loss is not seen to be a mean over rows")
@pytest.mark.parametrize(
    ("plan", "ranks", "branches"),
    [("data", 1, False), ("data", 2, False), ("tensor", 2, False), ("data", 1, True),
     ("data", 2, True)],
)  # fmt: skip
def test_sparse_gradients_are_summed_as_dense_ones(plan: str, ranks: int, branches: bool) -> None:
    model = Bag(False)
    model.table.sparse = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = []
    for i in range(3):
        optimizer.zero_grad()
        first, second = (mean_loss(model, batch(n, s)) for n, s in ((8, i), (4, i + 3)))
        ((first * 8 + second * 4) / 12).backward()
        expected += [first.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 0.2))]
        optimizer.step()
    with shared(("Bag", branches), Bag(branches), mean_loss, batch(8), plan, ranks=ranks):
        answers = run(ranks, bags, plan, branches)
    for noted, state in answers:
        assert noted == pytest.approx(expected, rel=1e-10)
        assert close(state, weights(model))
