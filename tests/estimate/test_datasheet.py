"""A datasheet's profile: what it shares with a measured one, and its laws."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh import catalogue
from synchromesh.estimate.datasheet import CPU, CountingBench, count, datasheet, update
from synchromesh.estimate.roofline import LAUNCH_SECONDS
from synchromesh.planner.problem import PlanningProblem
from synchromesh.programs.borders import StandIns, record
from synchromesh.programs.compute import Bench
from synchromesh.trace.capture.batch import take
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.local import Partition
from synchromesh.trace.partition.partition import partition
from synchromesh.trace.step import Step
from synchromesh.values.cluster import Cluster, Device, Host
from synchromesh.values.layout import Layout
from synchromesh.values.profile import Profile
from tests.models import FAMILIES
from tests.traces import remembered

ROWS = 8
V100 = catalogue.cluster("v100x4")


@cache
def stepped(name: str) -> tuple[nn.Module, Step, Any]:
    model, loss, make = FAMILIES[name]()
    batch = make(ROWS)
    return model, remembered(name, model, loss, batch, training=True), batch


def parted(step: Step, layout: Layout) -> Partition:
    return partition(step, [layout] * len(step.chain.components), rows=ROWS)


def asked(name: str) -> tuple[PlanningProblem, torch.optim.Optimizer]:
    model, step, _ = stepped(name)
    return PlanningProblem(step, ROWS, 4), torch.optim.AdamW(model.parameters())


class Square(nn.Module):
    """Two products: one that is cut by rows of its weight, one by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def flops(layout: Layout) -> tuple[int, int]:
    """Of all programs, forward and backward."""
    step = trace(Square(), loss, torch.ones(ROWS, 64), training=True)
    made = parted(step, layout)
    tensors = StandIns(step.chain, {}, CPU)
    borders = record(step, torch.ones(ROWS, 64), tensors, CPU)
    forward = backward = 0
    for local in made.components:
        found = count(CountingBench(step, made, local, tensors, borders, ROWS, CPU))
        forward += sum(o.flops for o in found.forward)
        backward += sum(o.flops for o in found.backward)
    return forward, backward


def test_flops_by_hand_and_halved_by_two_ranks() -> None:
    product = 2 * ROWS * 64 * 256
    whole = flops(Layout(1, 1))
    assert whole[0] == 2 * product
    # the first weight's gradient, both of the second product: nobody wants the batch's gradient
    assert whole[1] == 3 * product
    assert flops(Layout(1, 2)) == (whole[0] / 2, whole[1] / 2)


@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_memory_is_that_of_real_tensors(name: str) -> None:
    _, step, batch = stepped(name)
    made = parted(step, Layout(2, 2))
    profile = datasheet(*asked(name), [made], V100, {})
    tensors = StandIns(step.chain, {}, CPU)
    borders = record(step, take(batch, 0, 4), tensors, CPU)
    rows = ROWS // 2
    for local in made.components:
        real = Bench(step, made, local, tensors, borders, rows, CPU).bytes()
        told = profile.compute[local.program].memory
        assert told.kept(rows) == real.kept, local.component.name
        assert told.kept_inputs == real.kept_inputs
        assert told.kept_outputs == real.kept_outputs
        assert told.forward(rows) == real.forward, local.component.name
        assert told.backward(rows) == real.backward, local.component.name


def test_the_profile_has_every_program_and_says_what_it_is() -> None:
    _, step, _ = stepped("bert")
    parts = [parted(step, Layout(4, 1)), parted(step, Layout(1, 4))]
    profile = datasheet(*asked("bert"), parts, V100, {})
    keys = {local.program for p in parts for local in p.components}
    assert set(profile.compute) == keys
    assert (profile.source, profile.error_band) == ("datasheet", V100.error_band)
    assert profile.state_factor == pytest.approx(2.0)
    assert all(c.forward[0](ROWS) > 0 for c in profile.compute.values())
    assert Profile.from_dict(profile.to_dict()) == profile


def test_known_programs_are_not_counted_again() -> None:
    _, step, _ = stepped("cnn")
    parts = [parted(step, Layout(4, 1))]
    known = datasheet(*asked("cnn"), parts, V100, {})
    again = datasheet(*asked("cnn"), parts, V100, {}, known)
    assert all(again.compute[k] is known.compute[k] for k in known.compute)


def test_a_device_of_half_the_rates_takes_twice_as_long() -> None:
    def device(factor: float) -> Device:
        return Device("d", 10**9, {"float32": 1e7 * factor}, 1e7 * factor)

    hosts = (Host("a", (device(2.0),) * 2), Host("b", (device(1.0),) * 2))
    _, step, _ = stepped("cnn")
    made = parted(step, Layout(4, 1))
    profile = datasheet(*asked("cnn"), [made], Cluster("mixed", hosts), {})
    found = profile.compute[made.components[0].program]
    times = [curve(2) for curve in found.forward]
    assert times[0] == times[1] and times[2] == times[3]
    assert times[2] == pytest.approx(2 * times[0], rel=0.05)  # launches take the same on both


@pytest.mark.parametrize(
    ("make", "factor", "bytes_"),
    [
        # parameter and gradient read, parameter written
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0, 3),
        # state *= m, state += gradient, parameter += state
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1.0, 2 + 3 + 3),
    ],
)
def test_the_update_by_hand(make: Any, factor: float, bytes_: int) -> None:
    optimizer = make([nn.Parameter(torch.ones(3))])
    for kind in ("cpu", "gpu"):
        told = update(optimizer, Device(kind, 1, {}, 1e9))
        assert told.state_factor == factor
        assert told.byte == pytest.approx(bytes_ / 1e9)
    each = update(optimizer, Device("cpu", 1, {}, 1e9))
    at_once = update(optimizer, Device("gpu", 1, {}, 1e9))
    assert each.tensor >= LAUNCH_SECONDS and each.once < LAUNCH_SECONDS
    assert at_once.tensor == 0.0 and at_once.once >= LAUNCH_SECONDS
