"""Servers that step by each sum, and send what comes of it, while other sums are under way: as
`fit` lets them, in which nobody changes gradients or parameters between two steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from synchromesh.training.prepare import prepare
from synchromesh.values import buckets
from tests.ranks import run
from tests.training.test_workers import ROWS, adamw, batch, loss, model

SERVED = "data; @synchronisation=server"


def total(model: nn.Module, given: Any) -> dict[str, Tensor]:
    return {"loss": loss(model, given)[0]}


def trained(plan: str, ahead: bool, hooked: bool, folder: str) -> tuple[list[Any], int]:
    """What steps, an evaluation, a checkpoint and a switch there and back leave; how often the
    optimizer is called in the last step."""
    buckets.SIZES = replace(buckets.SIZES, first=64, full=64)  # several
    net = model()
    optimizer, calls = adamw(net), list[int]()
    if hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    trainer = prepare(net, optimizer, loss, batch(12, 0), plan)
    trainer.workers.ahead, found = ahead, list[Any]()
    usual = optimizer.step

    def step() -> None:
        calls.append(trainer.steps)
        usual()

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
    return found, calls.count(trainer.steps - 1)


@pytest.mark.wide(2)
@pytest.mark.parametrize("plan", [f"{SERVED}:2", f"{SERVED}:1; @servers=2", f"{SERVED}:3"])
def test_sums_are_stepped_by_as_they_come(plan: str, tmp_path: Path) -> None:
    (due, once), *_ = run(3, trained, plan, False, False, str(tmp_path / "a"))
    (found, calls), *_ = run(3, trained, plan, True, False, str(tmp_path / "b"))
    assert found == due
    assert once == 1 < calls


def test_a_hook_of_the_user_is_called_once_a_step(tmp_path: Path) -> None:
    (_, calls), *_ = run(2, trained, f"{SERVED}:2", True, True, str(tmp_path / "a"))
    assert calls == 1
