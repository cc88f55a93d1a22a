"""Sharded states and recomputation against a plain loop: every level, mixed with tensor degrees
and stages, odd sizes, shared, frozen and unused parameters, switches, checkpoints, dropout."""

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace.partition.explain import explain
from synchromesh.training.prepare import prepare
from synchromesh.values.plan import Plan
from tests.plain import LIMIT, Case, Outcome, adamw, all_on_ranks, apart, plain, sgd, traced, under
from tests.ranks import RankFailed, run

SERVERS = "@synchronisation=server"
STAGES = "@stages=0-1:embed/2-3:second; @micro_batches=3"


class Odd(nn.Module):
    """Sizes that no degree divides; a number, a frozen and an unused parameter; the table of
    embeddings is also the last layer's weight; `first` hands a view of its parameter on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(11, 7), nn.Linear(7, 9)
        self.drop, self.second = nn.Dropout(dropout), nn.Linear(9, 7)
        self.norm, self.scale = nn.LayerNorm(7), nn.Parameter(torch.tensor(1.5))
        self.head, self.unused = nn.Linear(7, 11), nn.Linear(2, 2)
        self.head.weight = self.embed.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.second(self.drop(torch.tanh(self.first(h)))) * self.scale
        return self.head(self.norm(h)) + self.embed.weight[:, 0]  # type: ignore[no-any-return]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))  # type: ignore[no-any-return]


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd().double()


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return Odd(0.3).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return Normed().double()


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    x, y = (torch.randint(0, 11, (rows, 3), generator=g) for _ in range(2))
    return x, y


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 5, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=g)


def words(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Typed(nn.Linear):
    """A layer that computes in the type of its input, whichever its parameters have."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))


class Tied(nn.Module):
    """A weight that two stages of one group of ranks use, and layers of a second data type."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.a, self.b, self.c, self.d, self.e = (Typed(8, 8) for _ in range(5))
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in (self.a, self.b, self.c, self.d, self.e):
            h = layer(h)
        return self.head(h)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = Tied().double()
    model.b.float()
    model.d.float()
    return model


TIED = Case(tied, words, [tokens(n) for n in (8, 8, 7)], adamw)
INTERLEAVED = "@stages=0-1:embed/2-3:b/0-1:c/2-3:e; @micro_batches=4; @schedule=interleaved"
ODD = Case(odd, words, [tokens(n) for n in (8, 7, 3)], adamw)  # 3: a rank has no rows
ALONE = Case(odd, words, [tokens(n) for n in (8, 6)], adamw, micro_batches=2)

CASES: list[tuple[Case, str]] = [
    *((ODD, word) for word in ("zero1", "zero2", "sharded-data", "data:recompute=yes")),
    *((ALONE, word) for word in ("zero1", "zero2", "sharded-data:recompute=yes")),
    (ODD, "hybrid:tensor=2,states=parameters"),
    (ODD, "hybrid:tensor=2,states=optimizer,recompute=yes"),
    (ODD, "tensor:recompute=yes"),
    (ODD, "sharded-data; first=hybrid:tensor=2,states=gradients; second=data"),
    (ODD, "zero1; second=tensor; head=zero2"),
    (ODD, "sharded-data; @rows=4,1,0,2"),
    (ODD, "sharded-data:recompute=yes; @pieces=2"),
    (ODD, f"sharded-data; {STAGES}"),
    (ODD, f"zero2:recompute=yes; first=data; {STAGES}; @schedule=gpipe"),
    (ODD, f"zero1; first=hybrid:tensor=2; {STAGES}"),
    (
        ODD,
        "sharded-data; @stages=0-1:embed/2-3:first/0-1:second/2-3:head; @micro_batches=2; "
        "@schedule=interleaved",
    ),
    (ODD, "sharded-data; @ranks=2,0,3"),
    (ODD, f"data; {SERVERS}:1"),
    (ALONE, f"data; {SERVERS}:3"),
    (ODD, f"data; {SERVERS}:2; @servers=3,1"),
    (ODD, f"data:recompute=yes; {SERVERS}:1; @servers=2; @rows=3,1,2; @micro_batches=2"),
    (ODD, f"hybrid:tensor=2; {SERVERS}:2"),
    (ODD, f"data; second=tensor; @rows=4,1,0,2; {SERVERS}:2"),
    (ODD, f"data:recompute=yes; first=hybrid:tensor=2; {STAGES}; {SERVERS}:1"),
    (TIED, f"data; {INTERLEAVED}; {SERVERS}:2"),
    (TIED, f"zero2; {INTERLEAVED}"),
    (TIED, f"sharded-data; {INTERLEAVED}"),
    (TIED, "sharded-data; @micro_batches=2"),
    (replace(TIED, micro_batches=3), "zero2; b=sharded-data"),
]


@pytest.fixture(scope="module")
def outcomes() -> list[list[Outcome]]:
    return all_on_ranks(CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[plan for _, plan in CASES])
def test_every_rank_computes_the_plain_loop(number: int, outcomes: list[list[Outcome]]) -> None:
    case = CASES[number][0]
    expected, limit = plain(case), 1e-6 if case.build is tied else LIMIT  # of its float32
    for found in outcomes:
        assert apart(found[number], expected) <= limit
        assert not found[number].opaque


# What ranks keep


def _kept(plan: str) -> tuple[int, int, int, int, int]:
    """Entries of parameters, gradients and optimizer state after a step; bytes of parameters that
    are there besides; bytes sent."""
    model = odd()
    optimizer = adamw(model)
    trainer = prepare(model, optimizer, words, tokens(8), plan)
    for n in (8, 7):
        trainer.world.ledger.reset()
        trainer.step(trainer.shard(tokens(n)))
    state = [x for s in optimizer.state.values() for x in s.values() if x.dim()]
    gathered = trainer._execution.sharding.whole.values()
    found = (
        sum(p.numel() for p in model.parameters()),
        sum(p.grad.numel() for p in model.parameters() if p.grad is not None),
        sum(x.numel() for x in state),
        sum(x.untyped_storage().nbytes() for x in gathered),
        trainer.world.ledger.sent,
    )
    trainer.close()
    return found


def test_each_rank_keeps_its_part_alone() -> None:
    model = odd()
    entire = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for n, p in model.named_parameters()
                  if p.requires_grad and "unused" not in n)  # fmt: skip
    with traced((ODD, "data"), (ODD, "zero1"), (ODD, "sharded-data"), ranks=3):
        whole = run(3, _kept, "data")
        for plan in ("zero1", "zero2", "sharded-data"):
            found = run(3, _kept, plan)
            numbers = 1  # `scale` is whole
            unsharded = 0 if plan == "sharded-data" else model.second.bias.numel()
            assert sum(x[1] for x in found) == trained + 2 * numbers
            assert sum(x[2] for x in found) == 2 * (trained - numbers)  # without numbers
            unused = sum(p.numel() for p in model.unused.parameters())
            assert sum(x[0] for x in found) == entire + 2 * (numbers + unsharded + unused)
            assert {x[3] for x in found} == {0}
    assert {x[:3] for x in whole} == {(entire, trained, 2 * (trained - 1))}


class Late(nn.Module):
    """The table of embeddings is used again in the middle, by a component whose inputs have no
    gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.late = nn.Embedding(11, 7), nn.Linear(7, 7), nn.Embedding(11, 7)
        self.b, self.head = nn.Linear(7, 7), nn.Linear(7, 11)
        self.late.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(self.embed(x)))
        return self.head(torch.tanh(self.b(h + self.late(x))))  # type: ignore[no-any-return]


def late() -> nn.Module:
    torch.manual_seed(0)
    return Late().double()


LATE = Case(late, words, [tokens(8), tokens(8)], adamw)
EXPLAINED = (
    "sharded-data; late=sharded-data; b=sharded-data", "zero2; late=zero2; @pieces=1",
    "hybrid:tensor=2,states=parameters,recompute=yes; late=hybrid:tensor=2; @pieces=1",
    "sharded-data:recompute=yes; late=sharded-data; @rows=3,1,2,1",
    f"data; late=data; {SERVERS}:3; @pieces=1", f"data; late=data; {SERVERS}:1; @servers=2",
    f"hybrid:tensor=2; {SERVERS}:1; @pieces=1",
)  # fmt: skip


def _sent() -> list[tuple[int, int, Outcome]]:
    """Bytes that a step sends, those that are explained, and what it computes."""
    found = []
    for text in EXPLAINED:
        plan = Plan.parse(text)
        model = late()
        trainer = prepare(model, adamw(model), words, tokens(8), plan)
        trainer.step(trainer.shard(tokens(8)))
        trainer.world.ledger.reset()
        trainer.step(trainer.shard(tokens(8)))
        told = explain(trainer.traced, trainer.partition, plan, 4, 8).sent_bytes_per_step
        sent = trainer.world.ledger.sent
        found.append((sent, told[trainer.rank], Outcome([], trainer.state_dict(), [])))
        trainer.close()
    return found


def test_it_sends_what_is_explained() -> None:
    expected = Outcome([], plain(LATE).state, [])
    with traced(*((LATE, plan) for plan in EXPLAINED)):
        for found in run(4, _sent):
            for sent, explained, outcome in found:
                assert sent == explained and apart(outcome, expected) <= LIMIT


# Dropout, batch norm


def _losses(plan: str, steps: int = 3) -> list[float]:
    model = dropping()
    trainer = prepare(model, sgd(model), words, tokens(8), plan, seed=5)
    losses = [float(trainer.step(trainer.shard(tokens(8)), 2)) for _ in range(steps)]
    trainer.close()
    return losses


def _pairs_of_losses() -> list[tuple[list[float], list[float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plans = ("single", "data", "hybrid:data=1,tensor=2", "data; first=tensor", "sharded-data")
        return [(_losses(p), _losses(f"{p}{',' if ':' in p else ':'}recompute=yes"))
                for p in plans[:3]] + [
            (_losses("sharded-data"), _losses("sharded-data:recompute=yes")),
            (_losses("data"), _losses("zero1")),
        ]  # fmt: skip


@pytest.mark.slow
def test_recomputation_draws_the_same_bits() -> None:
    for pairs in run(2, _pairs_of_losses, timeout=90.0):
        for kept, recomputed in pairs:
            assert kept == recomputed
        assert len(set(pairs[0][0])) == 3  # dropout draws anew in each step


def test_statistics_of_batch_norm_are_counted_once() -> None:
    case = Case(normed, classes, [vectors(8), vectors(6)])
    for plan in ("single:recompute=yes", "single:recompute=yes; @micro_batches=1"):
        assert apart(under(case, plan), plain(case)) <= LIMIT


# Switches and checkpoints

PLANS = (
    "data", "sharded-data", "hybrid:tensor=2,states=gradients", f"zero1:recompute=yes; {STAGES}",
    f"data; {SERVERS}:3", "zero2", "tensor", f"hybrid:tensor=2; {SERVERS}:1",
    "sharded-data; @ranks=1,3", f"data; @ranks=1,3; {SERVERS}:1", f"data; {SERVERS}:1; @servers=3",
)  # fmt: skip


def _switched(folder: str) -> tuple[Outcome, Outcome]:
    """A step under each plan, by switches; and again by checkpoints."""
    batches = [tokens(8 - i % 3) for i in range(len(PLANS))]
    model = odd()
    trainer = prepare(model, adamw(model), words, batches[0], PLANS[0])
    losses = []
    for i, (plan, batch) in enumerate(zip(PLANS, batches, strict=True)):
        if i:
            trainer.switch(plan)
        losses.append(float(trainer.step(trainer.shard(batch))))
        trainer.save(f"{folder}/{i}")
    switched = Outcome(losses, trainer.state_dict(), [])
    trainer.close()
    losses = losses[:1]
    for i, plan in enumerate(PLANS[1:], 1):
        model = odd()
        trainer = prepare(model, adamw(model), words, batches[i], plan)
        trainer.resume(f"{folder}/{i - 1}")
        losses.append(float(trainer.step(trainer.shard(batches[i]))))
        state = trainer.state_dict()
        trainer.close()
    return switched, Outcome(losses, state, [])


def test_states_move_between_all_levels(tmp_path: Path) -> None:
    case = Case(odd, words, [tokens(8 - i % 3) for i in range(len(PLANS))], adamw)
    expected = plain(case)
    with traced((ODD, "data")):
        for outcomes in run(4, _switched, str(tmp_path), timeout=120.0):
            assert all(apart(found, expected) <= LIMIT for found in outcomes)


def _abandoned(plan: str, folder: str) -> Outcome:
    """A checkpoint is resumed in the middle of an accumulation, whose gradients are of no use."""
    model = odd()
    trainer = prepare(model, adamw(model), words, tokens(8), plan)
    trainer.save(folder)
    trainer.backward(trainer.shard(tokens(6)), last=False)
    trainer.resume(folder)
    losses = [float(trainer.step(trainer.shard(batch))) for batch in ODD.batches]
    found = Outcome(losses, trainer.state_dict(), [])
    trainer.close()
    return found


@pytest.mark.parametrize("plan", ["zero1", "zero2", "data"])
def test_gradients_of_an_abandoned_accumulation_are_forgotten(plan: str, tmp_path: Path) -> None:
    for found in run(2, _abandoned, plan, str(tmp_path / "saved")):
        assert apart(found, plain(ODD)) <= LIMIT


def _clipped(plan: str) -> tuple[float, Outcome]:
    model = odd()
    trainer = prepare(model, sgd(model), words, tokens(8), plan)
    loss = trainer.backward(trainer.shard(tokens(8)))
    norm = float(trainer.clip(0.1))
    trainer.update()
    found = Outcome([float(loss)], trainer.state_dict(), [])
    trainer.close()
    return norm, found


def test_gradients_are_clipped_by_their_global_norm() -> None:
    want, expected = _clipped("single")
    for norm, found in run(2, _clipped, "sharded-data"):
        assert abs(norm - want) <= LIMIT and apart(found, expected) <= LIMIT


# What a user gets wrong


def _refused(plan: str, what: str) -> str:
    model = odd()
    optimizer: torch.optim.Optimizer = adamw(model)
    if what == "adafactor":
        optimizer = torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad])
    loss = words if what != "untraced" else lambda m, b: words(m, b) * float(m(b[0]).sum() > -1e9)
    warnings.simplefilter("ignore")
    try:
        prepare(model, optimizer, loss, tokens(8), plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "what", "said"),
    [
        ("zero1", "adafactor", "Adafactor"),
        ("hybrid:tensor=2,states=parameters", "", "nothing to shard over"),
        ("data; head=hybrid:data=1,states=optimizer", "", "nothing to shard over"),
        ("sharded-data:recompute=yes", "untraced", "is to shard its states and compute its"),
        ("data:recompute=yes", "untraced", "the model's own activation checkpoints"),
    ],
)
def test_what_cannot_be_sharded_is_refused(plan: str, what: str, said: str) -> None:
    for told in run(2, _refused, plan, what):
        assert said in told


def test_one_device_shards_nothing() -> None:
    for plan in ("zero1", "zero2", "sharded-data:recompute=yes"):
        found = under(ODD, plan)
        assert apart(found, plain(ODD)) <= LIMIT
        assert any("there is nothing to shard over" in text for text in found.warned)


def _fails_on_one(plan: str) -> None:
    """On rank 1, in the backward of a second micro-batch, when sums of the first are on their
    way."""
    model = odd()
    trainer = prepare(model, adamw(model), words, tokens(8), plan)
    trainer.world.choices[0, 1, 2] = "ring"
    trainer.step(trainer.shard(tokens(8)), 2)
    trainer.backward(trainer.shard(tokens(8)), last=False)
    hook = next(iter(trainer._execution.sharding.whole.values())).register_hook
    if trainer.rank:
        hook(lambda gradient: _raise())
    trainer.backward(trainer.shard(tokens(8)), last=False)
    trainer.backward(trainer.shard(tokens(8)))


def _raise() -> Tensor:
    raise RuntimeError("planted")


@pytest.mark.parametrize("plan", ["sharded-data", "zero1"])
def test_a_rank_that_fails_ends_the_run(plan: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="planted"):
        run(3, _fails_on_one, plan, timeout=60.0)
    assert time.monotonic() - began < 30.0
