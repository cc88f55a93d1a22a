"""Plans with stages against a plain loop: every schedule, uneven groups and rows, skips, shared
tensors, weights, switches, checkpoints; what a user gets wrong."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.plain import LIMIT, Case, Outcome, adamw, all_on_ranks, apart, plain, sgd, traced, under
from tests.ranks import RankFailed, run

FOUR = "data; @stages=0:a/1:b/2:c/3:d; @micro_batches=4"


class Skips(nn.Module):
    """`a` is read by b, c and d, so that its value skips stages; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.d = nn.Linear(8, 3)
        self.c.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.a(x))
        b = torch.tanh(self.b(a)) + a
        return self.d(torch.tanh(self.c(b)) + a)  # type: ignore[no-any-return]


class Tied(nn.Module):
    """The embedding is also the last layer's weight; `scale` is a value without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.gain = nn.Linear(6, 6, bias=False)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.middle(self.embed(x))))
        return self.head(torch.tanh(self.gain(h)))  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))  # type: ignore[no-any-return]


class Asks(Skips):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("told_apart", torch.zeros(1))  # from `Skips`, by tests/traces.py

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if x.shape[0] > 4 else x)  # type: ignore[no-any-return]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def skips() -> nn.Module:
    return built(Skips)


def asks() -> nn.Module:
    return built(Asks)


def tied() -> nn.Module:
    return built(Tied)


def normed() -> nn.Module:
    return built(Normed)


def vectors(rows: int, seed: int, width: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g, dtype=torch.float64)
    return x, torch.randint(0, classes, (rows,), generator=g)


def tokens(rows: int, seed: int) -> dict[str, Tensor]:
    """The first rows are ignored: of some micro-batches, all."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 11, (rows, 5), generator=g)
    y = torch.randint(0, 11, (rows, 5), generator=g)
    y[: rows // 3] = -100
    return {"x": x, "y": y}


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """A weight that depends on parameters."""
    weight = torch.sigmoid(model(batch[0])).mean(-1)
    return (
        weight * F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    ).sum(), weight.sum()


SKIPS = Case(skips, classes, [vectors(n, n) for n in (8, 9, 3)], adamw)
ASKS = Case(asks, classes, [vectors(n, n) for n in (8, 3)], adamw)
TIED = Case(tied, words, [tokens(n, n) for n in (9, 7)], adamw)
WEIGHTED = Case(skips, weighted, [vectors(n, n) for n in (8, 5)], adamw)

CASES: list[tuple[Case, str]] = [
    (SKIPS, FOUR),
    (SKIPS, "data; @stages=0:a/1:b/0:c/1:d; @micro_batches=7; @schedule=interleaved"),
    (SKIPS, "data; @stages=0-2:a/3:d; @micro_batches=4"),
    (SKIPS, "data; a=tensor; d=tensor; @stages=0-1:a/2-3:c; @micro_batches=3"),
    (SKIPS, "hybrid:tensor=2; b=data; @stages=1,0,3,2:a; @micro_batches=2"),
    (SKIPS, "data; b=tensor; @stages=0:a/1-2:b; @micro_batches=2"),  # reads `a` in two layouts
    (ASKS, "data; @stages=0:a/1:c; @micro_batches=2"),
    (TIED, "data; @stages=0:embed/1:middle/2,3:head; @micro_batches=4"),
    (TIED, "tensor; head=data; @stages=0-1:embed/2-3:head; @micro_batches=2"),
    (TIED, "data; @stages=0:embed/1:middle/0:head; @micro_batches=3; @schedule=interleaved"),
    (WEIGHTED, "data; @stages=0:a/1-3:c"),
    # gradients of weights that come later
    (SKIPS, f"{FOUR[:-1]}7; @schedule=zero-bubble"),  # 3 rows are fewer than micro-batches
    (SKIPS, f"{FOUR[:-1]}2; @schedule=zero-bubble"),
    (SKIPS, f"{FOUR[:-1]}9; @schedule=zero-bubble-2".replace("9", "8")),
    (SKIPS, "hybrid:tensor=2; b=data; @stages=1,0,3,2:a; @micro_batches=3; @schedule=zero-bubble"),
    (SKIPS, "data:recompute=yes; @stages=0-2:a/3:d; @micro_batches=4; @schedule=zero-bubble"),
    (SKIPS, "data; @stages=0:a/1:b/0:c/1:d; @micro_batches=5; @schedule=zero-bubble"),
    (TIED, "data; @stages=0:embed/1:middle/2,3:head; @micro_batches=4; @schedule=zero-bubble"),
    (TIED, "data; @stages=0:embed/1:middle/0:head; @micro_batches=3; @schedule=zero-bubble-2"),
    (SKIPS, "single; @schedule=zero-bubble; @micro_batches=3"),
]


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    return all_on_ranks(CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[plan for _, plan in CASES])
def test_every_rank_computes_the_plain_loop(number: int, outcomes: list[list[Outcome]]) -> None:
    expected = plain(CASES[number][0])
    for found in outcomes:
        assert apart(found[number], expected) <= LIMIT
        assert not found[number].opaque


def _in_detail(case: Case, plan: str) -> Outcome:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return under(case, plan)


def test_collectives_that_wait_for_each_other_hold_up_no_stage() -> None:
    plan = "data; @stages=0:embed/1:middle/0:head; @micro_batches=3; @schedule=interleaved"
    for found in run(2, _in_detail, TIED, plan, timeout=30.0):
        assert apart(found, plain(TIED)) <= LIMIT


# Statistics of batch norm are of a micro-batch


def _normed(plan: str, sizes: tuple[int, ...]) -> Outcome:
    case = Case(normed, classes, [vectors(n, n, 5, 2) for n in sizes])
    return under(case, plan)


def test_batch_norm_normalises_each_micro_batch() -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for n in (8, 6):
        x, y = vectors(n, n, 5, 2)
        optimizer.zero_grad()
        parts = [(x[: n // 2], y[: n // 2]), (x[n // 2 :], y[n // 2 :])]
        value = sum(classes(model, part) for part in parts) / 2
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    expected = Outcome(losses, dict(model.state_dict()), [])
    for found in run(2, _normed, "data; @stages=0:a/1:b; @micro_batches=2", (8, 6)):
        assert apart(found, expected) <= LIMIT


# Buffers that change while earlier micro-batches await their backward


class Counts(nn.Module):
    """Backward reads the count with which forward scaled, and rows are counted after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.b(self.a(x) * self.count.clone()))
        self.count.add_(x.square().mean())
        return self.c(h)  # type: ignore[no-any-return]


def counts() -> nn.Module:
    return built(Counts)


def test_backward_reads_what_a_buffer_was() -> None:
    model = counts()
    (x, y), optimizer = vectors(6, 6), sgd(model)
    total = 0.0
    for i in (0, 2, 4):
        loss = classes(model, (x[i : i + 2], y[i : i + 2])) / 3
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    optimizer.step()
    expected = Outcome([total], dict(model.state_dict()), [])
    plan = "data; @stages=0:a/1:c; @micro_batches=3"
    for found in run(2, under, Case(counts, classes, [vectors(6, 6)]), plan):
        assert apart(found, expected) <= LIMIT


def rooted(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]).sqrt()


def test_micro_batches_of_a_loss_that_is_no_mean_are_warned_of() -> None:
    case = Case(skips, rooted, [vectors(8, 8)])
    for plan, warned in (("single", False), ("single; @micro_batches=2", True)):
        found = under(case, plan).warned
        assert any("may be another one" in text for text in found) == warned


# Switches, checkpoints, evaluation, clipping

CURVE = (
    "data",
    "data; @stages=0-1:a/2-3:c; @micro_batches=2",
    "data; @stages=0:a/1:b/0:c/1:d; @micro_batches=4; @schedule=interleaved",
    "data; @stages=0:a/1:b/2:c/3:d; @micro_batches=4; @schedule=zero-bubble",
    "tensor",
    "single",
    "hybrid:tensor=2; @stages=2-3:a/0-1:b; @micro_batches=2",
)


def correct(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = model(batch[0])
    return {"correct": (logits.argmax(-1) == batch[1]).sum(), "peak": logits.max(-1).values.sum()}


def _trained(trainer: Trainer, steps: range) -> list[float]:
    found = []
    for k in steps:
        trainer.backward(trainer.shard(vectors(8, k)))
        found.append(float(trainer.clip(0.5)))
        trainer.update()
        loader = trainer.loader(list(zip(*vectors(7, 99), strict=True)), batch_size=4)
        found += trainer.evaluate(loader, correct).values()
    return found


def _started(plan: str) -> Trainer:
    model = skips()
    return prepare(model, adamw(model), classes, vectors(8, 0), plan)


def _curve(plans: tuple[str, ...], save: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = _started(plans[0])
    found: list[float] = []
    for k, plan in enumerate(plans):
        if k:
            trainer.switch(plan)
        found += _trained(trainer, range(2 * k, 2 * k + 2))
        if k == 1:
            trainer.save(save)
    state = trainer.state_dict()
    trainer.close()
    return found, state


def _resumed(plan: str, path: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = _started(plan)
    trainer.resume(path)
    found = _trained(trainer, range(4, 6))
    state = trainer.state_dict()
    trainer.close()
    return found, state


def test_one_curve_over_switches_and_checkpoints(tmp_path: Path) -> None:
    case = Case(skips, classes, [vectors(8, 0)])
    resumed = ((3, "data", "stages"), (2, "data; @stages=0:a/1:c; @micro_batches=2", "alone"))
    plans = {*CURVE, *(plan for _, plan, _ in resumed)}
    with traced(*((case, plan) for plan in sorted(plans))):
        alone = _curve(("data",) * len(CURVE), str(tmp_path / "alone"))
        for found in run(4, _curve, CURVE, str(tmp_path / "stages"), timeout=120.0):
            assert apart(Outcome(*found, []), Outcome(*alone, [])) <= LIMIT
        expected = _resumed("data", str(tmp_path / "alone"))
        for ranks, plan, saved in resumed:
            for found in run(ranks, _resumed, plan, str(tmp_path / saved)):
                assert apart(Outcome(*found, []), Outcome(*expected, [])) <= LIMIT


# What a user gets wrong


class Branches(nn.Module):
    """No trace: it branches on its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h if h.sum() > 0 else -h)  # type: ignore[no-any-return]


REFUSED = {
    "pipeline:stages=3": "3 groups of equally many ranks do not divide 2 devices",
    "data; @stages=0:a/1:b/0:c/1:d/0:e": "first component 'e' is none; there are 'a', 'b'",
    "pipeline:stages=5": "5 stages, but the model has 4 components",
    "pipeline:stages=3; @schedule=interleaved": "their number is even, not 3",
    "data; @stages=0:a/1:cc": "first component 'cc' is none",
    "data; @stages=0:a/1:d/0:b": "stages stand in the order of the model's components",
    "data; @stages=0-1:a/1:b": "overlap in part",
    "pipeline:stages=2,microbatches=9": "8 rows cannot be cut into 9 micro-batches",
    "data; @stages=0:a/1:b; @schedule=1f2b": "unknown schedule '1f2b'; did you mean '1f1b'",
    "zero1; @stages=0:a/1:b; @schedule=zero-bubble": "use 1f1b, or leave sharded states",
    "data; @stages=0:a/2:b": "names rank 2, but there are 2 ranks",
}


def first_weights(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"a": model.a.weight.detach().sum() * len(batch[0])}  # type: ignore[union-attr, operator]


def branching(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    logits = model(batch[0])
    return {"size": logits.sum() if logits.sum() > 0 else -logits.sum()}


def _refusals() -> dict[str, str]:
    found = {}
    for plan in REFUSED:
        try:
            _started(plan)
        except ValueError as error:
            found[plan] = str(error)
    model = built(Branches)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepare(model, adamw(model), classes, vectors(8, 0), "data; @stages=0:a/1:b")
    except ValueError as error:
        found["untraced"] = str(error)
    trainer = _started("data; @stages=0:a/1:b; @micro_batches=2")
    batch = vectors(8, 0)
    data = list(zip(*batch, strict=True))
    found["of one stage"] = str(trainer.evaluate(trainer.loader(data, 4), first_weights)["a"])
    for name, call in {
        "metric": lambda: trainer.evaluate(trainer.loader(data, 4), branching),
        "share": lambda: trainer.step(
            (batch[0][: 4 + trainer.rank], batch[1][: 4 + trainer.rank])
        ),
        "by hand": lambda: trainer.step(trainer.shard(batch), micro_batches=2),
    }.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    found["goes on"] = str(float(trainer.step(trainer.shard(batch))))
    trainer.close()
    return found


def test_what_cannot_be_run_is_one_sentence_on_all_ranks() -> None:
    first, second = run(2, _refusals, timeout=60.0)
    assert first == second, "no rank may go on alone"
    for plan, sentence in REFUSED.items():
        assert sentence in first[plan]
    assert "there are 'model'" in first["untraced"] and "branch" in first["untraced"]
    assert (
        "rank 0 was given 4 rows, but of a global batch of 4 rows the plan gives it 4"
        not in first["share"]
    )
    total = float(skips().a.weight.detach().sum())  # type: ignore[union-attr, operator, arg-type]
    assert float(first["of one stage"]) == pytest.approx(total)
    assert "this metric is refused, though the training step was not" in first["metric"]
    assert "trainer.loader and trainer.shard" in first["share"]
    assert "leave this out, or write @micro_batches=2 into the plan" in first["by hand"]
    assert float(first["goes on"]) == pytest.approx(
        float(classes(skips(), vectors(8, 0)).detach())
    )


def _dies() -> None:
    trainer = _started(FOUR)
    if trainer.rank == 2:
        trainer.model.parameters["c.weight"].register_hook(_fault)
    for k in range(3):
        trainer.step(trainer.shard(vectors(8, k)))


def _fault(_: Tensor) -> Tensor:
    raise RuntimeError("a fault in the third stage")


def test_a_rank_that_dies_ends_all() -> None:
    with pytest.raises(RankFailed, match="a fault in the third stage"):
        run(4, _dies, timeout=30.0)
