"""The state of an optimizer: what lies like parameters, what is whole, what has no place."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from synchromesh.checkpoint.optimizer_state import OptimizerState
from synchromesh.programs.model import Model


def updated(kind: Any, **settings: Any) -> tuple[OptimizerState, torch.optim.Optimizer]:
    """After one update of a matrix, a vector and a number."""
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    optimizer = kind(module.parameters(), **settings)
    (module(torch.ones(4, 3)).sum() * module.scale).backward()
    optimizer.step()
    return OptimizerState(Model(module), optimizer), optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.ASGD])
def test_a_new_optimizer_adopts_it(kind: Any) -> None:
    state, _ = updated(kind, lr=0.1)
    module = nn.Linear(3, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    new = OptimizerState(Model(module), kind(module.parameters(), lr=0.2))
    new.adopt(state.describe())
    for name in state.model.parameters:
        assert new.of(name).keys() == state.of(name).keys()
        for key, tensor in state.moving(name).items():
            assert new.moving(name)[key].shape == tensor.shape and not new.of(name)[key].any()
        rest = state.of(name).keys() - state.moving(name).keys()
        assert all(torch.equal(new.of(name)[k], state.of(name)[k]) for k in rest)
    assert new.optimizer.param_groups[0]["lr"] == 0.1


def test_settings_that_are_tensors_come_back_as_such() -> None:
    betas = (torch.tensor(0.8), torch.tensor(0.9))
    state, optimizer = updated(torch.optim.Adam, lr=torch.tensor(0.1), betas=betas, foreach=False)
    described = json.loads(json.dumps(state.describe()))
    optimizer.param_groups[0].update(lr=torch.tensor(0.0), betas=(0.1, 0.2))
    state.adopt(described)
    group = optimizer.param_groups[0]
    assert group["betas"] == betas and torch.equal(group["lr"], torch.tensor(0.1))
    optimizer.step()


def test_whole_tensors_are_those_of_other_shapes() -> None:
    state, _ = updated(torch.optim.Adafactor)
    assert {k: tuple(t.shape) for k, t in state.whole("weight").items()} == {
        "col_var": (1, 3),
        "row_var": (2, 1),
    }
    assert list(state.shaped("bias")) == ["variance"] and not state.whole("bias")
    state.refuse_pieces("bias")
    with pytest.raises(ValueError, match=r"Adafactor keeps col_var of shape \(1, 3\) for weight"):
        state.refuse_pieces("weight")


def test_what_has_no_place_is_named() -> None:
    state, optimizer = updated(torch.optim.Adam)
    with pytest.raises(ValueError, match="saved with the optimizer Adam, this is SGD"):
        OptimizerState(
            state.model, torch.optim.SGD(state.model.parameters.values(), lr=0.1)
        ).adopt(state.describe())
    optimizer.state["all"] = {"distance": 1.0}
    with pytest.raises(ValueError, match="Adam keeps state of 'all', which is no parameter"):
        state.describe()
