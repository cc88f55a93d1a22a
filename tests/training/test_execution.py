"""The execution: a plan that is refused at any question leaves the one before in force, and a
failure when state has moved ends the trainer with a sentence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.checkpoint.model_state import ModelState
from synchromesh.checkpoint.optimizer_state import OptimizerState
from synchromesh.engine.gradients import GradientSync
from synchromesh.planning.live import LivePlanning
from synchromesh.training import active_plan, execution
from synchromesh.training.active_plan import PlanCheck
from synchromesh.training.execution import Execution
from synchromesh.training.gradient_sums import GradientSums
from synchromesh.training.notices import Notices
from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from synchromesh.values.plan import Plan
from tests.ranks import run
from tests.traces import shared

# What is asked of a plan, in order: whatever may refuse it comes before anything has changed.
ASKED: tuple[tuple[Any, str], ...] = (
    (Plan, "check_rows"),
    (active_plan, "refuse_parts"),
    (active_plan, "refuse_untraced"),
    (PlanCheck, "_stated"),
    (active_plan, "partition"),
    (active_plan, "holdings"),
    (active_plan, "check_optimizer"),
    (OptimizerState, "refuse_pieces"),
    (PlanCheck, "_agreed_mark"),
    (LivePlanning, "check_held"),
    (Notices, "partitioned"),
    (Notices, "undivided"),
    (active_plan, "PlanGroups"),
    (active_plan, "RowAgreement"),
)
# What is done then, in order.
DONE: tuple[tuple[Any, str], ...] = (
    (GradientSync, "close"),
    (ModelState, "move"),
    (execution, "Sharding"),
    (Execution, "_programs"),
    (GradientSums, "adopt"),
    (execution, "PieceCount"),
)
BATCH = (torch.arange(48.0).reshape(8, 6).sin().double(), torch.arange(8) % 4)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def start() -> Trainer:
    model = net()
    return prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss, BATCH, "data")


def said(do: Callable[[], object]) -> str:
    try:
        do()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(f"refused by {name}")

    return refuse


def calls() -> list[str]:
    """What a switch calls, in order."""
    trainer, called = start(), list[str]()

    def noted(name: str, right: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **settings: Any) -> Any:
            called.append(name)
            return right(*args, **settings)

        return note

    with pytest.MonkeyPatch.context() as patch:
        for place, name in (*ASKED, *DONE):
            patch.setattr(place, name, noted(name, getattr(place, name)))
        trainer.switch("tensor")
    trainer.close()
    return list(dict.fromkeys(called))


def test_a_plan_is_asked_about_before_anything_is_done() -> None:
    names = [name for _, name in (*ASKED, *DONE)]
    with shared("net", net(), loss, BATCH, "data", "tensor", ranks=2):
        assert run(2, calls) == [names] * 2


def refused() -> tuple[list[str], list[float]]:
    """What is said where each question refuses a switch in turn, and the losses between."""
    trainer = start()
    texts, losses = [], []
    for place, name in ASKED:
        before = trainer._execution.active, trainer._execution.programs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, name, refusing(name))
            texts.append(said(lambda: trainer.switch("tensor")))
        assert (trainer._execution.active, trainer._execution.programs) == before
        losses.append(trainer.step(trainer.shard(BATCH)).item())
    trainer.switch("tensor")
    losses.append(trainer.step(trainer.shard(BATCH)).item())
    trainer.close()
    return texts, losses


def alone() -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(len(ASKED) + 1):
        optimizer.zero_grad()
        value = loss(model, BATCH)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_a_plan_that_is_refused_leaves_the_one_before_in_force() -> None:
    with shared("net", net(), loss, BATCH, "data", "tensor", ranks=2):
        answers = run(2, refused)
    for texts, losses in answers:
        assert texts == [f"refused by {name}" for _, name in ASKED]
        assert losses == pytest.approx(alone(), rel=1e-12)


def failed(number: int) -> list[str]:
    """What is said where something fails when state moves, and by the methods that are called
    then."""
    trainer = start()
    trainer.step(trainer.shard(BATCH))
    place, name = DONE[number]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, refusing(name))
        texts = [said(lambda: trainer.switch("tensor"))]
    texts += [
        said(do)
        for do in (
            lambda: trainer.step(BATCH),
            lambda: trainer.plan,
            lambda: trainer.switch("data"),
            lambda: trainer.state_dict(),
        )
    ]
    trainer.close()
    return texts


@pytest.mark.parametrize("number", range(len(DONE)), ids=[name for _, name in DONE])
def test_a_failure_when_state_has_moved_ends_the_trainer(number: int) -> None:
    with shared("net", net(), loss, BATCH, "data", "tensor", ranks=2):
        for first, *others in run(2, failed, number):
            assert first == f"refused by {DONE[number][1]}"
            assert all(text.startswith("no plan is in force, for a switch") for text in others)


def unfit() -> str:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelState, "start", refusing("start"))
        return said(lambda: prepare(model, optimizer, loss, BATCH, "data"))


def test_a_first_plan_that_fails_says_why() -> None:
    assert run(1, unfit) == ["refused by start"]
