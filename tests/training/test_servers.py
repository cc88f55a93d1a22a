"""Servers that step by each sum, and send what comes of it, while other sums are under way: as
`fit` lets them, in which nobody changes gradients or parameters between two steps."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from synchromesh.engine import early_step
from synchromesh.training import events
from synchromesh.training.fit import fit
from synchromesh.training.prepare import prepare
from synchromesh.values import buckets
from synchromesh.values.optimizer import hooked
from tests.ranks import RankFailed, run
from tests.targets import target
from tests.training.test_workers import ROWS, adamw, batch, loss, model

SERVED = "data; @synchronisation=server"


def total(model: nn.Module, given: Any) -> dict[str, Tensor]:
    return {"loss": loss(model, given)[0]}


class Parted(early_step.DividedStep):
    steps = 0

    def step(self, start: int, stop: int, last: bool) -> None:
        Parted.steps += 1
        super().step(start, stop, last)


def trained(plan: str, ahead: bool, hooked: bool, folder: str) -> tuple[list[Any], int, int]:
    """What steps, an evaluation, a checkpoint and a switch there and back leave; how often the
    optimizer is called in the last step, and for parts of a parameter."""
    early_step.DividedStep = Parted  # type: ignore[misc]
    buckets.SIZES = replace(buckets.SIZES, served=64)  # several, some in several messages
    net = model()
    optimizer, calls = adamw(net), list[int]()
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    trainer = prepare(net, optimizer, loss, batch(12, 0), plan)
    trainer.workers.early.allowed, found = ahead, list[Any]()
    usual = optimizer.step

    def step() -> None:
        calls.append(trainer.steps)
        usual()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # no function of a user
    optimizer.step = step  # type: ignore[method-assign]
    for seed, rows in enumerate(ROWS):
        found.append(float(trainer.step(trainer.shard(batch(rows, seed)))))
        if seed == 1:
            found += trainer.evaluate([trainer.shard(batch(6, 9))], total).values()
            trainer.save(folder)
        if seed == 2:
            trainer.resume(folder)
        if seed == 4:
            trainer.switch("data")
            trainer.switch(plan)
    found += [x.tolist() for x in trainer.state_dict().values()]
    trainer.close()
    return found, calls.count(trainer.steps - 1), Parted.steps


@pytest.mark.wide(2)
@pytest.mark.parametrize("plan", [f"{SERVED}:2", f"{SERVED}:1; @servers=2", f"{SERVED}:3"])
def test_sums_are_stepped_by_as_they_come(plan: str, tmp_path: Path) -> None:
    (due, once, _), *_ = run(3, trained, plan, False, False, str(tmp_path / "a"))
    (found, calls, own), *others = run(3, trained, plan, True, False, str(tmp_path / "b"))
    assert found == due
    assert once == 1 < calls
    assert own + sum(parts for *_, parts in others) > 0


def test_a_hook_of_the_user_is_called_once_a_step(tmp_path: Path) -> None:
    (_, calls, _), *_ = run(2, trained, f"{SERVED}:2", True, True, str(tmp_path / "a"))
    assert calls == 1


def test_functions_of_a_user_are_told_from_a_schedulers() -> None:
    optimizer = adamw(model())
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert not hooked(optimizer)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert hooked(optimizer)
    handle.remove()
    assert not hooked(optimizer)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    assert hooked(optimizer)


class Detached(nn.Module):
    """The gradient of one of its parameters never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return self.c(h + self.b(h).detach())  # type: ignore[no-any-return]


def with_missing_gradients(plan: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    net = Detached().double()
    trainer = prepare(net, adamw(net), loss, batch(12, 0), plan)
    found = [float(trainer.step(trainer.shard(batch(12, seed)))) for seed in range(2)]
    trainer.switch("data")
    found.append(float(trainer.step(trainer.shard(batch(12, 2)))))
    state = trainer.state_dict()
    trainer.close()
    return found, state


@pytest.mark.parametrize("plan", [f"{SERVED}:1", f"{SERVED}:1; @servers=1"])
def test_a_gradient_that_never_comes_keeps_no_other_back(plan: str) -> None:
    (due, state), *_ = run(3, with_missing_gradients, "data")
    for found, own in run(3, with_missing_gradients, plan):
        assert found == pytest.approx(due, abs=1e-12)
        for name, expected in state.items():
            assert torch.allclose(own[name], expected, atol=1e-12), name


class Branching(nn.Module):
    """Runs untraced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return h if float(x.detach()[0, 0]) > 0 else -h  # type: ignore[no-any-return]


def untraced(plan: str) -> None:
    net = Branching().double()
    warnings.simplefilter("ignore")  # that it is untraced
    prepare(net, adamw(net), loss, batch(12, 0), plan)


def test_untraced_models_are_refused() -> None:
    with pytest.raises(RankFailed, match="is to keep its parameters on servers, which needs a"):
        run(2, untraced, f"{SERVED}:1")
    with pytest.raises(RankFailed, match="or write @synchronisation=local:8"):
        run(2, untraced, "data; @synchronisation=downpour:1")


def clamped(plan: str, reads: bool) -> tuple[dict[str, Tensor], bool]:
    """What a run leaves whose callback keeps parameters small, or says that it only reads."""
    buckets.SIZES = replace(buckets.SIZES, first=64, full=64)
    left, ahead, trainers = dict[str, Tensor](), list[bool](), list[Any]()

    def take(event: events.FitEvent) -> None:
        if isinstance(event, events.Started):
            trainers.append(event.trainer)
        if isinstance(event, events.StepDone):
            ahead.append(trainers[0].workers.early.allowed)
            with torch.no_grad():
                for p in () if reads else trainers[0].model.parameters.values():
                    p.clamp_(-0.05, 0.05)
        if isinstance(event, events.Finished):
            left.update(trainers[0].state_dict())

    given = events.only_reads(take) if reads else take
    fit(target("cnn"), plan, steps=4, adapt=False, say=lambda _: None, on_event=given)
    return left, any(ahead)


def test_what_a_callback_changes_is_what_the_next_step_computes_with() -> None:
    """Where it says that it changes nothing, parameters are sent ahead of it."""
    for reads in (False, True):
        (due, _), _ = run(2, clamped, "data", reads, timeout=110.0)
        (found, ahead), _ = run(2, clamped, f"{SERVED}:2", reads, timeout=110.0)
        assert ahead == reads
        for name, expected in due.items():
            assert torch.allclose(found[name], expected, atol=1e-12), name
