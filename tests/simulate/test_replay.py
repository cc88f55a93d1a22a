"""Replays of recorded steps: what was recorded again, and what devices do that differ."""

import random
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh import catalogue
from synchromesh.cost.step_time import Recorded, recorded
from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planner.candidate import planned_step
from synchromesh.planning.session import PlanningSession
from synchromesh.simulate.replay import Replay, Weather
from synchromesh.trace.capture.capture import trace
from synchromesh.values.plan import Plan

ROWS = 32


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


@cache
def session(devices: int) -> PlanningSession:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers)
    step = trace(model, loss, torch.zeros(ROWS, 64), training=True)
    optimizer = torch.optim.AdamW(model.parameters())
    cluster = catalogue.cluster(f"v100x{devices}-ethernet25")
    return PlanningSession(DatasheetFacts.of(step, model, optimizer, ROWS, cluster))


def drawn(chance: random.Random) -> tuple[int, str]:
    """Devices and a plan."""
    devices = chance.choice([1, 2, 4, 8])
    stages = chance.choice([n for n in (1, 2, 4) if n <= devices])
    within = devices // stages
    words = ["data", "tensor", "sharded-data", "data:states=optimizer"] if within > 1 else ["data"]
    words += [f"hybrid:tensor={t}" for t in (2, 4) if within % t == 0 and within > t]
    word = chance.choice(words)
    if chance.random() < 0.3:
        word += ("," if ":" in word else ":") + "recompute=yes"
    if stages == 1:
        return devices, word + chance.choice(["", "", "; @micro_batches=2"])
    count = chance.choice([stages, 2 * stages])
    schedule = chance.choice(["1f1b", "gpipe"])
    return (
        devices,
        f"pipeline:stages={stages},microbatches={count}; *={word}; @schedule={schedule}",
    )


def record(devices: int, text: str) -> tuple[Recorded, list[list[int]]]:
    asked = session(devices)
    candidate, known = asked.priced(Plan.parse(text), None)
    assert candidate.time is not None and known is not None, candidate.reason
    planned = planned_step(asked.partitions, candidate.plan)
    made = recorded(planned, known, candidate.time.pieces)
    assert made.time == candidate.time  # the same walk
    return made, [[planned.ranks[p] for p in its] for its in planned.positions]


@pytest.mark.parametrize("seed", range(40))
def test_equal_devices_take_what_was_recorded(seed: int) -> None:
    devices, text = drawn(random.Random(seed))
    print(devices, text)
    made, ranks = record(devices, text)
    (seconds,) = Replay(made, ranks, Weather(), 1).seconds()
    assert seconds == pytest.approx(made.time.seconds, rel=1e-9)
