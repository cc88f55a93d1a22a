"""Two losses over one model, as of a GAN: one trainer takes turns; a second one is refused."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.training import traces
from synchromesh.training.prepare import prepare
from tests.plain import Case, all_on_ranks, apart, plain, under
from tests.ranks import run

D = torch.float64


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5))
        self.critic = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        self.generates = False  # whose turn it is
        self.to(D)

    def forward(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(noise)
        return self.critic(real), self.critic(made if self.generates else made.detach())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, made = model(*batch)
    if model.generates:
        return F.softplus(-made).mean()
    return (F.softplus(made) + F.softplus(-real)).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": part.parameters()} for part in (model.generator, model.critic)]
    return torch.optim.AdamW(groups, lr=0.01)


def turns(model: nn.Module, i: int) -> None:
    model.generates = bool(i % 2)  # type: ignore[assignment]
    model.generator.requires_grad_(model.generates)
    model.critic.requires_grad_(not model.generates)


def rows(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    return torch.randn(count, 5, generator=g, dtype=D), torch.randn(count, 4, generator=g, dtype=D)


CASE = Case(Gan, loss, [rows(n) for n in (6, 7, 8, 5, 6, 7)], adam, between=turns)


def two_optimizers() -> list[float]:
    """The same as it is written by hand."""
    model = Gan()
    optimizers = [
        torch.optim.AdamW(p.parameters(), lr=0.01) for p in (model.critic, model.generator)
    ]
    losses = []
    for i, batch in enumerate(CASE.batches):
        model.generates = bool(i % 2)
        model.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizers[i % 2].step()
        losses.append(value.item())
    return losses


def test_one_trainer_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made, trace = [], traces.capture
    monkeypatch.setattr(traces, "capture", lambda *a, **more: made.append(1) or trace(*a, **more))
    outcome = under(CASE, "single")
    assert outcome.losses == pytest.approx(two_optimizers(), rel=1e-12)
    assert apart(outcome, plain(CASE)) <= 1e-12
    assert len(made) == 3  # as it was prepared, and one of each turn


def test_so_it_does_on_ranks() -> None:
    plans = ["data", "tensor", "sharded-data; critic=tensor"]
    for of_rank in all_on_ranks([(CASE, plan) for plan in plans], ranks=2):
        for outcome in of_rank:
            assert apart(outcome, plain(CASE)) <= 1e-10 and not outcome.opaque


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(D)


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(D)


def prepared(model: nn.Module, plan: str) -> Callable[[], float]:
    """A step of a new trainer of the model, which it does not close."""
    trainer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), squares, BATCH, plan)
    return lambda: trainer.step(trainer.shard(BATCH)).item()


def second_trainers(plan: str) -> list[str]:
    model, told = small(), []
    first = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), squares, BATCH, plan)
    for other in (model, nn.Sequential(model, nn.Tanh()), model[0]):
        with pytest.raises(
            ValueError, match="belongs to another trainer, of a Sequential"
        ) as found:
            prepared(other, plan)
        told.append(str(found.value))
    before = first.step(first.shard(BATCH)).item()  # it goes on
    first.switch("data")
    first.close()
    assert prepared(model, plan)() < before
    return told


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("tensor", 2)])
def test_a_second_trainer_is_told_what_to_do(plan: str, ranks: int) -> None:
    found = run(ranks, second_trainers, plan) if ranks > 1 else [second_trainers(plan)]
    for told in found:
        assert "the model's 0.weight" in told[0] and "close() before" in told[0]
        assert "0.0.weight" in told[1] and "the model's weight" in told[2]
        assert not any("hook" in text for text in told)


def dropped(plan: str) -> str:
    model = small()
    prepared(model, plan)
    gc.collect()
    with pytest.raises(ValueError) as found:
        prepared(model, plan)
    return str(found.value)


def test_one_that_was_dropped_is_not_taken_for_a_hook_of_the_user() -> None:
    assert all("belongs to another trainer" in text for text in run(2, dropped, "data"))


def test_on_one_process_one_that_was_dropped_is_in_nobodys_way() -> None:
    model = small()
    first = prepared(model, "single")()
    gc.collect()
    assert prepared(model, "single")() < first
