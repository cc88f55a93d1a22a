"""Seconds of calls: the equations, the trivial program that they are measured with, no traces."""

from dataclasses import replace
from itertools import count as count_from
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.engine.world import World
from synchromesh.profiling import calls as module
from synchromesh.profiling.calls import TUNING, call_seconds
from synchromesh.programs.model import Model
from synchromesh.values.profile import Calls

CPU = torch.device("cpu")


def measured(model: nn.Module) -> Calls:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return call_seconds(World.open(CPU), Model(model), optimizer, torch.ones(4, 2))


def test_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """n components take 10 + 2n and 20 + 3n, one alone 1 and 5: what it has of its own counts
    once for all."""
    monkeypatch.setattr(module, "_trivial", lambda w, n, now: (10.0 + 2 * n, 20.0 + 3 * n))
    monkeypatch.setattr(module, "_timed_alone", lambda device: (1.0, 5.0))
    monkeypatch.setattr(module, "_step", lambda *_: 7.0)
    assert measured(nn.Linear(2, 2)) == Calls(1.0, -2.0, 10.0, 20.0, 7.0)


def test_what_is_measured_is_small_and_leaves_no_trace() -> None:
    model = nn.Linear(2, 2)
    drawn, weight = torch.get_rng_state(), model.weight.detach().clone()
    found = measured(model)
    assert torch.equal(torch.get_rng_state(), drawn) and torch.equal(model.weight, weight)
    assert model.weight.grad is None
    assert 0 < found.step < 0.1 and found.begin_forward < 0.01 and found.begin_backward < 0.01
    assert found.backward < found.forward < 0.01, "alone it has a call of autograd's own"


@pytest.mark.parametrize("count", [1, 3])
def test_the_trivial_program_is_run_by_the_engine(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks when it is read, and by no less: one tick each way."""
    ticks, ran = count_from(0), []
    run = module.Program.run

    def spied(program: Any, *given: Any, **settings: Any) -> Any:
        found = run(program, *given, **settings)
        ran.append([out.outputs[0].item() for out in found.results])
        return found

    monkeypatch.setattr(module.Program, "run", spied)
    monkeypatch.setattr(module, "TUNING", replace(TUNING, runs=3))
    assert module._trivial(World.open(CPU), count, lambda: float(next(ticks))) == (1.0, 1.0)
    assert ran == [[1.0]] * 4, "the product of ones; the first run is not counted"
    assert len(module._chain(count)[1].components) == count
