"""The state of a trainer: schedulers go on where they were, and what has no form is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from synchromesh.checkpoint.manifest import CheckpointError
from synchromesh.data.cursor import Cursor
from synchromesh.engine.noise_averages import NoiseState
from synchromesh.training.trainer_state import TrainerState

Made = Callable[[torch.optim.Optimizer], schedules.LRScheduler]


NOISE = NoiseState({"2": 40, "4": 8}, 0.9, 12, 11.5, 11.0, (-1.0, 2.0, 3.0, -4.0, 5.0))


def state(scheduler: Any = None, **extra: Any) -> TrainerState:
    cursors = (Cursor(3, 1, 20), Cursor())
    return TrainerState(
        7, -1, "data", 2, {"chosen": 1, "steps": 0}, {}, scheduler, cursors, 20, extra, NOISE
    )


def again(value: TrainerState) -> TrainerState:
    return TrainerState.from_dict(json.loads(json.dumps(value.to_dict())), Path("here"))


def test_it_survives_a_checkpoint() -> None:
    assert again(state(best=0.5)) == state(best=0.5)


SCHEDULES: dict[str, Made] = {
    "milestones": lambda o: schedules.MultiStepLR(o, [2, 5, 5], 0.1),
    "in a row": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1), schedules.MultiStepLR(o, [3], 0.1)], [2]
    ),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, 8),
}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_scheduler_goes_on(name: str, tensor: bool) -> None:
    """With milestones, which are keys that are no texts, and rates that are tensors."""

    def start() -> tuple[torch.optim.Optimizer, schedules.LRScheduler]:
        rate = torch.tensor(1.0) if tensor else 1.0
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate, momentum=0.5)
        return optimizer, SCHEDULES[name](optimizer)

    optimizer, scheduler = start()
    for _ in range(3):
        scheduler.step()
    other, resumed = start()
    saved = again(state(scheduler.state_dict())).scheduler
    assert saved is not None
    resumed.load_state_dict(dict(saved))
    for group, known in zip(other.param_groups, optimizer.param_groups, strict=True):
        group["lr"] = torch.as_tensor(known["lr"]).clone() if tensor else known["lr"]
    for _ in range(4):
        scheduler.step()
        resumed.step()
        assert float(other.param_groups[0]["lr"]) == float(optimizer.param_groups[0]["lr"])


def test_what_has_no_form_is_named() -> None:
    with pytest.raises(ValueError, match="extra cannot be kept: Object of type Tensor"):
        state(x=torch.ones(1)).to_dict()
    with pytest.raises(ValueError, match="state_dict of the scheduler holds a function"):
        state({"curve": again}).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "x"}, "here: steps: should be a whole number"),
        ({"cursors": [{"seed": 1}]}, "here: cursor: .*epoch"),
        ({"scheduler": {"a": 1, "b": 2}}, "here: scheduler: should have one key"),
    ],
)
def test_damage_is_found_before_anything_is_adopted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        TrainerState.from_dict({**state().to_dict(), **change}, Path("here"))
    value = state().to_dict()
    del value["extra"]
    with pytest.raises(CheckpointError, match="is no checkpoint of a trainer"):
        TrainerState.from_dict(value, Path("here"))
