"""Sums of gradients that come late (`@synchronisation=stale:k`): what a plain loop computes that
steps by gradients of k steps before."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synchromesh.training.prepare import prepare
from synchromesh.training.trainer import Trainer
from tests.ranks import run
from tests.traces import shared
from tests.training.test_workers import batch, loss, model

ROWS = (12, 5, 12, 1, 12, 12)
AT = "@synchronisation="


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class Plain:
    """A loop on one process, of which gradients are taken `late` steps late."""

    def __init__(self) -> None:
        self.net = model()
        self.optimizer = momentum(self.net)
        self.waiting: deque[list[Tensor | None]] = deque()
        self.losses: list[float] = []

    def train(self, rows: Sequence[int], late: int, clip: float | None = None) -> None:
        for seed, n in enumerate(rows):
            self.optimizer.zero_grad()
            value, weight = loss(self.net, batch(n, seed))
            (value / weight).backward()
            self.losses.append(float((value / weight).detach()))
            self.waiting.append([p.grad for p in self.net.parameters()])
            if len(self.waiting) > late:
                self.take(clip)

    def take(self, clip: float | None = None) -> None:
        for p, gradient in zip(self.net.parameters(), self.waiting.popleft(), strict=True):
            p.grad = gradient
        if clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), clip)
        self.optimizer.step()

    def drain(self) -> None:
        while self.waiting:
            self.take()


def train(trainer: Trainer, rows: Sequence[int], clip: float | None = None) -> list[float]:
    losses = []
    for seed, n in enumerate(rows):
        losses.append(float(trainer.backward(trainer.shard(batch(n, seed)))))
        if clip is not None:
            trainer.clip(clip)
        trainer.update()
    return losses


def steps(late: int, clip: float | None, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Late, then a switch to usual sums, back, a checkpoint, more, and the checkpoint again."""
    net = model()
    trainer = prepare(net, momentum(net), loss, batch(12, 0), f"data; {AT}stale:{late}")
    losses = train(trainer, ROWS, clip)
    trainer.switch("data")
    losses += train(trainer, ROWS[:2], clip)
    trainer.switch(f"hybrid:tensor=2; {AT}stale:{late}")
    losses += train(trainer, ROWS[:3], clip)
    trainer.save(folder)
    train(trainer, ROWS[:2])
    trainer.resume(folder)
    losses += train(trainer, ROWS[:1], clip)
    found = losses, trainer.state_dict()
    trainer.close()
    return found


@pytest.mark.parametrize(("late", "clip"), [(1, None), (3, None), (2, 0.3)])
def test_steps_are_by_gradients_of_steps_before(
    late: int, clip: float | None, tmp_path: Path
) -> None:
    plain = Plain()
    plain.train(ROWS, late, clip)
    plain.drain()
    plain.train(ROWS[:2], 0, clip)
    plain.train(ROWS[:3], late, clip)
    plain.drain()
    plain.train(ROWS[:1], late, clip)
    plain.drain()
    with shared("late sums", model(), loss, batch(12, 0), "data"):
        for losses, state in run(4, steps, late, clip, str(tmp_path / "saved"), timeout=90):
            assert losses == pytest.approx(plain.losses, abs=1e-10)
            for name, expected in plain.net.state_dict().items():
                assert torch.allclose(state[name], expected, atol=1e-10)


def accumulated() -> tuple[float, float]:
    """An evaluation in the middle of an accumulation: its gradients stay."""
    net = model()
    trainer = prepare(net, momentum(net), loss, batch(12, 0), f"data; {AT}stale:1")
    train(trainer, (12, 12))
    trainer.backward(trainer.shard(batch(12, 5)), last=False)
    before = sum(float(x.abs().sum()) for x in trainer.gradients().values())
    trainer.buffers()
    after = sum(float(x.abs().sum()) for x in trainer.gradients().values())
    trainer.close()
    return before, after


def test_an_accumulation_stays() -> None:
    for before, after in run(2, accumulated):
        assert before == after > 0


def refused(plan: str) -> str:
    net = model()
    try:
        prepare(net, momentum(net), loss, batch(12, 0), plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (f"zero1; {AT}stale:1", "leave sharded states"),
        (f"data; {AT}stale:1; @compression=int8", "leave sharded states"),
        (f"data; {AT}stale:0", "from 1 to 999999"),
        (f"data; {AT}stale", "from 1 to 999999"),
    ],
)
def test_what_cannot_be_asked_for(plan: str, why: str) -> None:
    assert all(why in text for text in run(2, refused, plan))


def shares() -> str:
    net = model()
    trainer = prepare(net, momentum(net), loss, batch(12, 0), f"data; {AT}stale:1")
    given: Any = trainer.shard(batch(12, 0))
    try:
        trainer.backward(given, last=False, share=0.5)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


def test_shares_are_refused() -> None:
    assert all("share= sums gradients at every call" in text for text in run(2, shares))
