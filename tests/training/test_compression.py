"""Compressed gradients: what as many plain workers compute, torch's own hook, and what remains of
what is owed over switches, checkpoints and traces."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from synchromesh.runs.trainer_events import memory_tracker
from synchromesh.trace.partition.explain import explain
from synchromesh.training.gradient_sums import GradientSums
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values import buckets
from synchromesh.values.buckets import BucketSizes
from synchromesh.values.plan import Plan
from tests.ranks import run
from tests.traces import known, shared

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")
ROWS = (12, 12, 7, 12, 1, 12)  # the fifth batch leaves all ranks but one without rows
WORDS = ("fp16", "int8", "onebit", "topk:0.2", "powersgd:2")
STAGES = "data; @stages=0-1:body.0/2-3:head"


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 30), nn.LayerNorm(30), nn.Tanh(), nn.Linear(30, 20))
        self.scale, self.head = Scale(), nn.Linear(20, 4)
        self.extra = nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(self.body(x))
        return self.head(x) + self.extra(x[:, :10].square())  # type: ignore[no-any-return]


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(rows: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=g).to(dtype)
    return x, torch.randint(4, (rows,), generator=g)


def loss(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def trainer(plan: str, optimizer: Any = adamw, dtype: torch.dtype = torch.float64) -> Trainer:
    own = model(dtype)
    return prepare(own, optimizer(own), loss, batch(12, 0, dtype), plan)


def go_on(of: Trainer, first: int, last: int = len(ROWS), micro: int = 1) -> None:
    for index in range(first, last + 1):
        of.step(of.shard(batch(ROWS[index - 1], index)), micro_batches=micro)


def close(found: Any, wanted: Any, limit: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=limit, atol=limit / 100)


# What plain workers compute


def int8(blocks: Tensor) -> Tensor:
    m = (blocks.abs().amax(-1, keepdim=True) / 127).float().double()
    return torch.where(m > 0, (blocks / m).round().clamp(-127, 127) * m, 0.0)


def onebit(blocks: Tensor) -> Tensor:
    m = blocks.abs().mean(-1, keepdim=True).float().double()
    return torch.where(blocks >= 0, m, -m)


def fp16(blocks: Tensor) -> Tensor:
    return blocks.half().double()


class Workers:
    """So many workers with one model, the gradients of which one plain process makes and sends in
    one bucket: parameters in reverse order, one after the other."""

    def __init__(self, count: int, word: str, optimizer: Any) -> None:
        self.count, self.word, self.model = count, word, model()
        self.optimizer = optimizer(self.model)
        self.parameters = [*self.model.parameters()][::-1]
        self.numbers = sum(p.numel() for p in self.parameters)
        self.owed = [torch.zeros(self.numbers).double() for _ in range(count)]
        block = 1 if word == "fp16" else 256
        self.part = block * math.ceil(self.numbers / count / block)
        self.second = torch.zeros(count, self.part).double()
        self.factors: list[Tensor] = []

    def gradients(self, rows: int, seed: int) -> list[Tensor]:
        given, made = batch(rows, seed), []
        for start, stop in Plan.parse("data").row_ranges(rows, self.count):
            self.model.zero_grad()
            if start < stop:
                share = (stop - start) / rows
                (loss(self.model, [x[start:stop] for x in given]) * share).backward()
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            made.append(torch.cat([g.reshape(-1) for g in parts]))
        return made

    def quantised(self, own: list[Tensor], code: Callable[[Tensor], Tensor]) -> Tensor:
        size = 1 if self.word == "fp16" else 256
        padded = [F.pad(x, (0, self.count * self.part - self.numbers)) for x in own]
        sent = [code(x.view(-1, size)).view(-1) for x in padded]
        for x, c, owed in zip(own, sent, self.owed, strict=True):
            owed.copy_(x - c[: self.numbers])
        made = []
        for j in range(self.count):
            here = slice(j * self.part, (j + 1) * self.part)
            total = sum((c[here] for c in sent), self.second[j])
            total[max(0, self.numbers - j * self.part) :] = 0.0
            made.append(code(total.view(-1, size)).view(-1))
            self.second[j] = total - made[-1]
        return torch.cat(made)[: self.numbers]

    def largest(self, own: list[Tensor], fraction: float) -> Tensor:
        total = torch.zeros(self.numbers).double()
        for x, owed in zip(own, self.owed, strict=True):
            order = x.abs().argsort(descending=True)[: math.ceil(fraction * self.numbers)]
            total[order] += x[order]
            owed.copy_(x)
            owed[order] = 0.0
        return total

    def low_rank(self, own: list[Tensor], rank: int) -> Tensor:
        """Of the sum, as all of it is linear; the start is this package's own."""
        x, g = torch.stack(own).sum(0), torch.Generator().manual_seed(0)
        made, number, start = x.clone(), 0, 0
        for p in self.parameters:
            part = slice(start, start + p.numel())
            start += p.numel()
            if p.dim() < 2 or rank * sum(p.shape) >= p.numel():
                continue
            if len(self.factors) == number:
                first = [
                    torch.randn(q.shape[1], rank, generator=g, dtype=torch.float64)
                    for q in self.parameters
                    if q.dim() == 2 and rank * sum(q.shape) < q.numel()
                ]
                self.factors = first
            m = x[part].view(p.shape)
            left = torch.linalg.qr(m @ self.factors[number]).Q
            self.factors[number] = m.T @ left
            made[part] = (left @ self.factors[number].T).view(-1)
            number += 1
        for owed in self.owed:
            owed.copy_((x - made) / self.count)
        return made

    def step(self, rows: int, seed: int) -> None:
        own = [g + e for g, e in zip(self.gradients(rows, seed), self.owed, strict=True)]
        name, _, amount = self.word.partition(":")
        if name == "topk":
            total = self.largest(own, float(amount))
        elif name == "powersgd":
            total = self.low_rank(own, int(amount))
        else:
            total = self.quantised(own, {"int8": int8, "onebit": onebit, "fp16": fp16}[name])
        for p, x in zip(
            self.parameters, total.split([p.numel() for p in self.parameters]), strict=True
        ):
            p.grad = x.view(p.shape).clone()
        self.optimizer.step()


def trained(plan: str, optimizer: Any = adamw, one_bucket: bool = False, micro: int = 1) -> Any:
    if one_bucket:
        buckets.SIZES = BucketSizes(first=1 << 24)
    of = trainer(plan, optimizer)
    go_on(of, 1, micro=micro)
    state = of.state_dict()
    of.close()
    return state


@pytest.mark.wide(6)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("word", WORDS)
def test_compressed_sums_are_those_of_plain_workers(word: str, ranks: int) -> None:
    optimizer = momentum if ranks == 4 else adamw
    workers = Workers(ranks, word, optimizer)
    for index, rows in enumerate(ROWS, 1):
        workers.step(rows, index)
    plan = f"data; @compression={word}"
    with shared("compressed", model(), loss, batch(12, 0), plan, ranks=ranks):
        found = run(ranks, trained, plan, optimizer, True)
    for state in found:
        close(state, found[0], 0.0)  # to the last bit
    close(found[0], workers.model.state_dict())


@pytest.mark.parametrize("plan", ["data", "hybrid:tensor=2", STAGES])
def test_all_copies_stay_equal_and_a_fine_code_is_near_to_none(plan: str) -> None:
    words = "fp16", "extra:powersgd:1,*:onebit"
    fine, rough = (f"{plan}; @compression={word}" for word in words)
    with shared("compressed", model(), loss, batch(12, 0), plan, fine, rough, ranks=4):
        exact, found, other = (run(4, trained, p, momentum) for p in (plan, fine, rough))
    for states in (found, other):
        for state in states:
            close(state, states[0], 0.0)
    close(found[0], exact[0], 1e-3)
    with pytest.raises(AssertionError):
        close(other[0], exact[0], 1e-3)


def test_micro_batches_are_sent_once() -> None:
    plan = "data; @compression=powersgd:2"
    cut = f"{plan}; @micro_batches=3"
    with shared("compressed", model(), loss, batch(12, 0), plan, cut, ranks=2):
        one, other = run(2, trained, plan)[0], run(2, trained, cut)[0]
    close(one, other, 1e-8)
    with shared("compressed", model(), loss, batch(12, 0), plan, ranks=2):
        close(run(2, trained, plan, adamw, False, 2)[0], one, 1e-8)


# torch's own


def without_scalar() -> nn.Module:
    """torch's hook has none."""
    own = model()
    own.scale = nn.Identity()
    return own


def with_torch() -> dict[str, Tensor]:
    """DistributedDataParallel with `powerSGD_hook`; two steps come before it begins."""
    own = without_scalar()
    ddp = DistributedDataParallel(own)
    state = torch_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    order: list[tuple[int, ...]] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if state.iter == 2:
            order[:] = [tuple(g.shape) for g in bucket.gradients()]
        return torch_hook.powerSGD_hook(state, bucket)  # type: ignore[no-any-return]

    ddp.register_comm_hook(state, hook)
    optimizer = momentum(own)
    for index in range(8):
        x, y = (part.chunk(2)[dist.get_rank()] for part in batch(12, index))
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return {**own.state_dict(), "order": torch.tensor([math.prod(s) for s in order])}


def with_ours(order: Sequence[int]) -> dict[str, Tensor]:
    """The same start: what torch's random numbers are, in the order of its bucket."""
    buckets.SIZES = BucketSizes(first=1 << 24)
    own = without_scalar()
    of = prepare(own, momentum(own), loss, batch(12, 0), "data")
    for index in range(2):
        of.step(of.shard(batch(12, index)))
    of.switch("data; @compression=powersgd:2")
    (bucket,) = of.sums.now.compressed
    compressor: Any = bucket.compressor
    low = [i.parameter for i, is_low in zip(bucket.items, compressor._low, strict=True) if is_low]
    state = torch_hook.PowerSGDState(None, 2)
    torch.manual_seed(state.rng.randint(1_000_000_000))
    for size in order:
        for p, q in zip(low, compressor.factors, strict=True):
            if p.numel() == size:
                q.copy_(torch.randn(1, *q.shape, dtype=torch.float64)[0])
    for index in range(2, 8):
        of.step(of.shard(batch(12, index)))
    found = of.state_dict()
    of.close()
    return found


def test_powersgd_is_that_of_torch() -> None:
    plans = ["data", "data; @compression=powersgd:2"]
    theirs = run(2, with_torch)[0]
    order = theirs.pop("order").tolist()
    assert len({n for n in order if n > 30}) == len([n for n in order if n > 30])
    with shared("compressed", without_scalar(), loss, batch(12, 0), *plans, ranks=2):
        ours = run(2, with_ours, order)[0]
    close(ours, theirs, 1e-9)


# What is owed, from plan to plan


def owed(of: Trainer) -> dict[str, Tensor]:
    """Of all ranks together, complete."""
    sums: GradientSums = of.sums
    own = sums._total()
    found = {n: torch.zeros_like(p).double() for n, p in of.model.parameters.items()}
    return {n: x.clone() for n, x in of.state.gathered(found | own)}


def switched(plans: Sequence[str]) -> list[dict[str, Tensor]]:
    of = trainer(plans[0])
    go_on(of, 1, 2)
    found = [owed(of)]
    for plan in plans[1:]:
        of.switch(plan)
        found.append(owed(of))
    go_on(of, 3, 4)
    found.append(of.state_dict())
    of.close()
    return found


def test_what_is_owed_moves_with_the_plan() -> None:
    first = "data; @compression=int8"
    others = [
        "hybrid:tensor=2; @compression=onebit",
        f"{STAGES}; @compression=head:powersgd:1,body:topk:0.5",
        "data; @ranks=3,1; @compression=int8",
    ]
    with shared("compressed", model(), loss, batch(12, 0), first, *others, ranks=4):
        found = run(4, switched, [first, *others, "data"])
    for before, hybrid, stages, two, none, _ in found:
        assert all(x.any() for x in before.values())
        close(hybrid, before)
        close({n: x for n, x in stages.items() if "body" in n or "head" in n},
              {n: x for n, x in before.items() if "body" in n or "head" in n})  # fmt: skip
        assert not stages["scale.value"].any() and not stages["extra.weight"].any()
        close(two, stages)
        assert not any(x.any() for x in none.values())
    for state in found:
        close(state[-1], found[0][-1], 0.0)


def saved(plan: str, other: str, folder: str) -> list[dict[str, Tensor]]:
    of = trainer(plan)
    go_on(of, 1, 3)
    of.save(folder)
    found = [owed(of)]
    go_on(of, 4, 4)
    of.resume(folder)
    found.append(owed(of))
    of.close()
    of = trainer(other)
    of.resume(folder)
    found.append(owed(of))
    go_on(of, 4)
    found.append(of.state_dict())
    of.close()
    return found


@pytest.mark.parametrize(
    ("plan", "other"),
    [
        ("data; @compression=onebit", "hybrid:tensor=2; @compression=powersgd:2"),
        (f"{STAGES}; @compression=powersgd:2", "data; @compression=topk:0.1"),
        ("hybrid:tensor=2; @compression=int8", "data"),
        ("data", "data; @compression=int8"),
    ],
)
def test_checkpoints_have_what_is_owed(plan: str, other: str, tmp_path: Path) -> None:
    with shared("compressed", model(), loss, batch(12, 0), plan, other, ranks=4):
        for before, again, elsewhere, _ in run(4, saved, plan, other, str(tmp_path / "saved")):
            assert any(x.any() for x in before.values()) == ("@" in plan)
            close(again, before)
            if "@compression" in other:
                close(elsewhere, before)


def retraced() -> list[dict[str, Tensor]]:
    of = trainer("data; @compression=onebit")
    go_on(of, 1, 2)
    found = [owed(of)]
    of.model.module.head.bias.requires_grad_(False)  # type: ignore[union-attr]
    go_on(of, 3, 3)
    found.append(owed(of))
    of.close()
    return found


def test_what_is_frozen_is_owed_nothing() -> None:
    with known("compressed"):
        before, behind = run(2, retraced)[0]
    assert before["head.bias"].any() and not behind["head.bias"].any()
    assert behind["head.weight"].any()


# Gradients that some lack, sparse ones, other types


class Words(nn.Module):
    """Sparse gradients, and a part that only some batches need."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, sparse=True)
        self.head, self.extra = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words).mean(1))  # type: ignore[no-any-return]


def of_words(model: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def sparse(plan: str, spare: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    own = Words().double()
    own.table.sparse = spare
    g = torch.Generator().manual_seed(0)
    data = [(torch.randint(40, (8, 5), generator=g), torch.arange(8) % 3) for _ in range(4)]
    of = prepare(own, momentum(own), of_words, data[0], plan)
    for b in data:
        of.step(of.shard(b))
    found = of.state_dict()
    of.close()
    return found


@pytest.mark.parametrize("word", ["int8", "topk:0.1", "powersgd:2"])
def test_sparse_gradients_are_dense_ones(word: str) -> None:
    plan = f"data; @compression={word}"
    one, other = (run(2, sparse, plan, spare)[0] for spare in (True, False))
    close(one, other)
    close({"extra": one["extra.weight"]}, {"extra": Words_extra()})


def Words_extra() -> Tensor:
    torch.manual_seed(0)
    return Words().double().extra.weight.detach()


def in_half(plan: str) -> dict[str, Any]:
    of = trainer(plan, momentum, torch.bfloat16)
    for index in range(4):
        of.step(of.shard(batch(12, index, torch.bfloat16)))
    kinds = {str(x.dtype) for x in of.state.residuals}
    found = {"state": of.state_dict(), "kinds": sorted(kinds)}
    of.close()
    return found


def test_residuals_of_short_numbers_are_longer() -> None:
    exact = run(2, in_half, "data")[0]
    first, second = run(2, in_half, "data; @compression=int8")
    assert first["kinds"] == ["torch.float32"]
    close(first["state"], second["state"], 0.0)
    for name, x in first["state"].items():
        assert (x - exact["state"][name]).abs().max() < 0.05
    assert run(2, in_half, "data; @compression=fp16")[0]["kinds"] == []


# Bytes


def counted(plan: str) -> list[Any]:
    of = trainer(plan)
    go_on(of, 1, 1)
    of.world.ledger.reset()
    of.step(of.shard(batch(12, 1)))
    sent = of.gather_numbers(of.world.ledger.sent)
    explained = explain(of.traced, of.partition, of.plan, of.world.size, 12)
    with memory_tracker(of) as memory:
        of.step(of.shard(batch(12, 2)))
    states = sum(
        x.nbytes for s in of.optimizer.state.values() for x in s.values() if isinstance(x, Tensor)
    )
    kept = [h for h in of._execution.active.holdings.values() if h.compressor]
    sizes = sum(b.compressor.sizes.state_bytes for b in of.sums.now.compressed)
    of.close()
    return [
        sent,
        [*explained.sent_bytes_per_step],
        memory.by_kind.states - states,
        sizes,
        len(kept),
    ]


@pytest.mark.wide(6)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("word", [*WORDS, "head:powersgd:1,body:int8"])
def test_bytes_are_explained_to_the_byte(word: str, ranks: int) -> None:
    plan = f"data; @compression={word}"
    with shared("compressed", model(), loss, batch(12, 0), plan, ranks=ranks):
        for sent, explained, states, sizes, kept in run(ranks, counted, plan):
            assert sent == explained and min(sent) > 0
            assert states == sizes > 0
            assert kept == (8 if "head" in word else 10)


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [x for _ in range(4) for x in (nn.Linear(384, 384), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(384, 4))


def predicted(plan: str) -> tuple[int, int]:
    """Bytes at the peak of a step, and what they were."""
    own = wide()
    data = torch.randn(16, 384), torch.arange(16) % 4
    of = prepare(own, adamw(own), loss, data, plan)
    candidate = of.predict()
    assert candidate.time is not None, candidate.reason
    for _ in range(2):
        of.step(of.shard(data))
    with memory_tracker(of) as memory:
        of.step(of.shard(data))
    of.close()
    return candidate.memory[0].peak, memory.by_kind.total


@pytest.mark.wide(2)
@pytest.mark.parametrize("word", WORDS)
def test_memory_is_as_predicted(word: str) -> None:
    plan, data = f"data; @compression={word}", (torch.randn(16, 384), torch.arange(16) % 4)
    with shared("wide", wide(), loss, data, plan, ranks=2):
        for due, found in run(2, predicted, plan):
            assert due == pytest.approx(found, rel=0.05)


# What is refused


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("zero1; @compression=int8", "sums that every rank gets whole: leave"),
        ("data; @synchronisation=local:2; @compression=int8", "send no gradients"),
        ("data; @compression=nothing:int8", "'nothing' matches no parameter that is trained"),
        ("data; @compression=powersgd:40", r"40 \(20 \+ 30\) = 2000 .* take a rank of at most 11"),
    ],
)
def test_what_cannot_be_compressed_is_said(plan: str, words: str) -> None:
    with known("compressed"), pytest.raises(ValueError, match=words):
        trainer(plan)


def clipped(plan: str) -> list[float]:
    of = trainer(plan)
    of.backward(of.shard(batch(12, 1)))
    norm = float(of.clip(1e-3))
    after = float(torch.stack([g.square().sum() for g in of.gradients().values()]).sum().sqrt())
    of.close()
    return [norm, after]


def test_what_is_clipped_is_what_arrived() -> None:
    plan = "data; @compression=onebit"
    with shared("compressed", model(), loss, batch(12, 0), plan, ranks=2):
        first, second = run(2, clipped, plan)
    assert first == second
    assert first[1] == pytest.approx(1e-3, rel=1e-5)
