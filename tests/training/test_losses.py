"""Losses that take turns over one model, each with its optimizer: as the loop that is written by
hand, under every plan."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from synchromesh.training.prepare import prepare
from tests.ranks import RankFailed, run

D = torch.float64
Optimizers = dict[str, Optimizer] | Optimizer


class Gan(nn.Module):
    """With a part that both use, which the second loss alone trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))
        self.critic = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.0), nn.Linear(9, 1))
        self.to(D)


def critics(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, noise = batch
    with torch.no_grad():
        made = model.generator(noise)
    return (F.softplus(model.critic(made)) + F.softplus(-model.critic(real))).mean()


def generators(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    scores = model.critic(model.generator(batch[1]))
    return F.softplus(-scores).sum(), torch.ones_like(scores).sum()


def adams(model: Any) -> Optimizers:
    return {
        "critic": Adam(model.critic.parameters(), lr=0.02, betas=(0.5, 0.99)),
        "generator": AdamW(model.generator.parameters(), lr=0.01),
    }


class ActorCritic(nn.Module):
    """The actor's loss reads the critic's values, detached; neither reaches the other's part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.actor = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.to(D)


def actors(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    states, _ = batch
    chosen = F.log_softmax(model.actor(states), 1)[:, 0]
    return -(chosen * (states.sum(1) - model.critic(states).detach()[:, 0])).mean()


def values(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model.critic(batch[0])[:, 0], batch[0].sum(1))


def one_for_both(model: Any) -> Optimizers:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


def two_kinds(model: Any) -> Optimizers:
    return {
        "actor": SGD(model.actor.parameters(), lr=0.1),
        "critic": Adam(model.critic.parameters()),
    }


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    losses: dict[str, Any]
    optimizers: Callable[[nn.Module], Optimizers]


GAN = Case(Gan, {"critic": critics, "generator": generators}, adams)
TWO = Case(ActorCritic, {"actor": actors, "critic": values}, two_kinds)
ONE = Case(ActorCritic, {"actor": actors, "critic": values}, one_for_both)


def rows(count: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(count)
    return torch.randn(count, 5, generator=g, dtype=D), torch.randn(count, 4, generator=g, dtype=D)


BATCHES = [rows(n) for n in (8, 7, 6, 8)]


def by_hand(
    case: Case, batches: list[Any], parts: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    model = case.build()
    made, told = case.optimizers(model), []
    for batch in batches:
        for name, loss in case.losses.items():
            optimizer = made[name] if isinstance(made, dict) else made
            model.zero_grad()
            count, total = len(batch[0]), torch.zeros((), dtype=D)
            for start in range(0, count, -(-count // parts)):
                part = tuple(x[start : start + -(-count // parts)] for x in batch)
                value = loss(model, part)
                value = value[0] / value[1] if isinstance(value, tuple) else value
                total = total + value * len(part[0]) / count
            total.backward()
            optimizer.step()
            told.append(total.item())
    return told, model.state_dict()


def under(
    case: Case, plan: str, batches: list[Any], folder: str = "", resumed: bool = False,
    parts: int = 1, **more: Any,
) -> tuple[list[float], dict[str, Tensor]]:  # fmt: skip
    model = case.build()
    made = case.optimizers(model)
    trainer = prepare(model, made, case.losses, rows(8), plan, sync_batch_norm=True, **more)
    assert not trainer.traced.opaque
    if resumed:
        trainer.resume(folder)
    told = []
    for batch in batches:
        for name in case.losses:
            if parts == 1:
                told.append(trainer.step(trainer.shard(batch), loss=name).item())
                continue
            size = -(-len(batch[0]) // parts)
            for i in range(parts):
                part = tuple(x[i * size : (i + 1) * size] for x in batch)
                last = i == parts - 1
                value = trainer.backward(trainer.shard(part), last=last, loss=name)
            trainer.update()
            told.append(value.item())
    if folder and not resumed:
        trainer.save(folder)
    state = trainer.state_dict()
    assert all(p.requires_grad for p in model.parameters())
    trainer.close()
    return told, state


def require_equal(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-10)
    for name, tensor in want[1].items():
        torch.testing.assert_close(got[1][name], tensor, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("case", [GAN, TWO, ONE], ids=["gan", "two", "one"])
def test_one_process_is_as_by_hand(case: Case) -> None:
    require_equal(under(case, "single", BATCHES), by_hand(case, BATCHES))


def all_plans(case: Case, plans: list[str]) -> list[Any]:
    return [under(case, plan, BATCHES) for plan in plans]


PLANS = {
    "gan": (GAN, ["data; critic=tensor", "sharded-data"]),
    "two": (TWO, ["data", "tensor", "zero1; critic.*=tensor", "pipeline:stages=2,microbatches=2"]),
    "one": (ONE, ["sharded-data", "tensor:recompute=yes"]),
}


@pytest.mark.wide(1)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_as_by_hand(name: str) -> None:
    case, plans = PLANS[name]
    want = by_hand(case, BATCHES)
    for of_rank in run(2, all_plans, case, plans):
        for got in of_rank:
            require_equal(got, want)


def test_hybrid_is_as_by_hand() -> None:
    for got in run(4, under, TWO, "hybrid:tensor=2", BATCHES):
        require_equal(got, by_hand(TWO, BATCHES))


def test_auto_finds_one_plan_for_all() -> None:
    for got in run(2, under, TWO, "auto", BATCHES):
        require_equal(got, by_hand(TWO, BATCHES))


def switched(plans: list[str]) -> Any:
    trainer = prepare(m := ActorCritic(), two_kinds(m), TWO.losses, rows(8), plans[0])
    told = []
    for plan, batch in zip(plans, BATCHES, strict=True):
        trainer.switch(plan)
        told += [trainer.step(trainer.shard(batch), loss=n).item() for n in TWO.losses]
    return told, trainer.state_dict()


def test_plans_are_switched_between_turns() -> None:
    for got in run(2, switched, ["tensor", "sharded-data", "data", "tensor"]):
        require_equal(got, by_hand(TWO, BATCHES))


def test_what_a_turn_does_not_train_sends_nothing() -> None:
    def sent(loss: str) -> int:
        trainer = prepare(m := ActorCritic(), two_kinds(m), TWO.losses, rows(8), "data")
        trainer.step(trainer.shard(rows(8)), loss=loss)
        before = trainer.world.ledger.sent
        trainer.step(trainer.shard(rows(8)), loss=loss)
        sent = trainer.world.ledger.sent - before
        assert all(p.grad is None for n, p in m.named_parameters() if not n.startswith(loss))
        trainer.close()
        return sent

    model = ActorCritic()
    want = [sum(p.nbytes for p in part.parameters()) for part in (model.actor, model.critic)]
    for of_rank in run(2, lambda: [sent("actor"), sent("critic")]):
        assert of_rank == want


def test_accumulation_is_of_one_loss() -> None:
    case = Case(ActorCritic, TWO.losses, two_kinds)
    require_equal(under(case, "single", BATCHES, parts=2), by_hand(case, BATCHES, parts=2))


def test_a_checkpoint_goes_on_on_other_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "last")
    want = by_hand(GAN, BATCHES)
    first = run(2, under, GAN, "sharded-data", BATCHES[:2], folder)[0][0]
    second = under(GAN, "single", BATCHES[2:], folder, resumed=True)
    require_equal((first + second[0], second[1]), want)


def detached_alone(plan: str) -> list[float]:
    trainer = prepare(m := ActorCritic(), one_for_both(m), actors, rows(8), plan)
    return [trainer.step(trainer.shard(batch)).item() for batch in BATCHES]


@pytest.mark.parametrize("plan", ["sharded-data", "zero2"])
def test_a_part_whose_result_is_detached_gets_no_gradient(plan: str) -> None:
    assert run(2, detached_alone, plan)[0] == pytest.approx(detached_alone("single"), rel=1e-10)


def refused(of: Callable[[nn.Module], Any], losses: Any, **more: Any) -> str:
    with pytest.raises(ValueError) as found:
        prepare(m := ActorCritic(), of(m), losses, rows(8), "data", **more)
    return str(found.value)


def test_what_does_not_go_together_is_refused() -> None:
    losses = TWO.losses
    other = refused(
        lambda m: {"actor": SGD(m.actor.parameters()), "g": SGD(m.critic.parameters())}, losses
    )
    assert "optimizers of the losses actor, g, and the losses are actor, critic" in other
    both = refused(lambda m: {n: SGD(m.parameters()) for n in losses}, losses)
    assert "the loss 'critic' and another one have a parameter of shape (8, 5) in common" in both
    assert "the losses actor, critic, and the losses are one" in refused(two_kinds, actors)
    assert "carry cannot be of losses" in refused(one_for_both, losses, carry=torch.zeros)
    assert "loss should be a function" in refused(two_kinds, {**losses, "actor": None})
    steps = torch.optim.lr_scheduler.ConstantLR(SGD(Gan().parameters()))
    assert "scheduler cannot be of losses" in refused(two_kinds, losses, scheduler=steps)


def test_turns_are_named_and_not_mixed() -> None:
    model, told = ActorCritic(), list[str]()
    made = two_kinds(model)
    trainer = prepare(model, made, TWO.losses, rows(8), "single", say=told.append)
    trainer.adapt()
    assert "nothing to adapt: losses take turns" in told[-1] and trainer.adapter is None
    with pytest.raises(ValueError, match=r"loss=None names none of the .* \(actor, critic"):
        trainer.step(rows(8))
    with pytest.raises(ValueError, match="loss='d' names none"):
        trainer.step(rows(8), loss="d")
    trainer.backward(rows(8), last=False, loss="actor")
    with pytest.raises(ValueError, match="backward of the loss 'critic' in the middle of"):
        trainer.backward(rows(8), loss="critic")
    trainer.backward(rows(8), loss="actor")
    trainer.update()
    trainer.close()
    trainer = prepare(m := ActorCritic(), SGD(m.parameters()), actors, rows(8), "single")
    with pytest.raises(ValueError, match=r"loss='d' names none .*there is one alone"):
        trainer.step(rows(8), loss="d")
    trainer.close()


def apart() -> None:
    trainer = prepare(m := ActorCritic(), two_kinds(m), TWO.losses, rows(8), "data")
    trainer.step(trainer.shard(rows(8)), loss=["actor", "critic"][trainer.rank])


def test_ranks_take_the_same_turn() -> None:
    with pytest.raises(RankFailed, match="same `last`, `micro_batches`, `share` and `loss`"):
        run(2, apart)
